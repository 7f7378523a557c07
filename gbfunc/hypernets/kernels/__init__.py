"""Generation of tiles at the machine's limit: ReLU tiles and sines by native operators, row blocks for other g-nets."""
