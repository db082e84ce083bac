"""DeepSeek-ViT and its aligner: an RGB image in, the embeddings of its span of tokens out.

Whoever runs a model needs `build_vision` and what it gives; the parts are modules of their own.
"""

from .encoder import ImageEmbeddings, VisionEncoder, build_vision

__all__ = ["ImageEmbeddings", "VisionEncoder", "build_vision"]
