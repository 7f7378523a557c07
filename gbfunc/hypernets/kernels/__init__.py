"""Fast generation of tiles: compiled kernels for ReLU MLPs and for sines; other MLPs run in blocks of rows."""
