"""The Vulkan backend: LiteRT's GPU accelerator."""
