"""`--teacher`: which file holds the trained network whose outputs are targets."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError

from gbfunc.storage import genome_file

GENOME_FILE, BEST_FILE, WEIGHTS_FILE = "genome.safetensors", "best.safetensors", "model.safetensors"


def teacher_file(path: Path) -> Path:
    """The file that `--teacher` names, itself or as the folder it is in."""
    files = [path / name for name in (GENOME_FILE, WEIGHTS_FILE)] if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            return file
    if path.is_dir():
        raise FileNotFoundError(f"--teacher: {path} holds neither {GENOME_FILE} nor {WEIGHTS_FILE}")
    raise FileNotFoundError(f"--teacher: no such file or folder: {path}")


def is_genome(path: Path) -> bool:
    """Whether a file is a genome, not the weights of a network; `ValueError` if it is neither."""
    try:
        return genome_file.is_genome(path)
    except SafetensorError as error:
        raise ValueError(f"--teacher: {path} is no safetensors file: {error}") from error


def digest(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
