"""The NPU backend: LiteRT plugins, external delegates, NNAPI."""
