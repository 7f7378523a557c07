"""Fast generation of tiles: native operators for ReLU g-nets and sines, and row blocks for other g-nets."""
