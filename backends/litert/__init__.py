"""LiteRT's compiled models: the engine of the Vulkan backend and of NPU plugins."""
