"""The model families behind `engine.model_runner`: one module for each."""
