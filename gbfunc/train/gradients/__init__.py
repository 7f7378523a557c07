"""Loss and gradient of a genome on one batch, one file per strategy; `loss` is the eager one in one process."""
