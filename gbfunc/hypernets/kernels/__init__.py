"""Fast generation of tiles: compiled kernels for ReLU MLPs and for sines; all other g-nets run in blocks of rows."""
