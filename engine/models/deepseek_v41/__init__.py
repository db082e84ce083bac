"""DeepSeek-V4.1-Flash: configuration, weights, state and forward pass, for any size."""
