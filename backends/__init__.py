"""What runs a model: one file or folder per backend, and the processes they live in."""
