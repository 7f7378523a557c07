"""A page that grows a genome in the browser, and runs its network: one HTML file, which asks no network for anything.

Its JavaScript reads a genome's file (`read.js`, `steps.js`), generates the weights (`grow.js`), runs the p-nets of the
command line and those that `layers.py` describes (`networks.js`), and shows it all (`page.js`). The formats' constants
are in the package's Python alone.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from gbfunc.export.page.layers import Layer
from gbfunc.formats.compact import EXPONENT, MAGIC, STEPS
from gbfunc.formats.layout import DOCUMENTS, WORDS
from gbfunc.formats.statistics import LEAST_VARIANCE
from gbfunc.formats.steps import LARGEST
from gbfunc.formats.symbols import HALVINGS, NARROWEST, PIECE, POWERS, ROOTS, WIDEST
from gbfunc.plan import Plan
from gbfunc.plan.serial import VERSION
from gbfunc.types import JSON

NETWORK = ("read.js", "steps.js", "grow.js", "networks.js")
"""Scripts that need no browser."""

PNETS = ("mlp", "convnet", "lenet5", "allconv", "resnet20", "resnet56", "gpt")
TYPES = ("periodic", "bilinear", "low_rank", "xox", "constant", "gnet", "stochastic")
DTYPES, MOST_WEIGHTS = ("float32", "float64"), 64_000_000
"""P-nets that the page runs; types of g-net, dtypes and number of weights that the page grows."""


def check(plan: Plan) -> None:
    """Raise `ValueError` for a genome that a page cannot grow."""
    slots = [slot for tensor in plan.tensors for slot in tensor.slots]
    found = (
        ("a genome that changes a pretrained network", () if plan.base is None else ("",)),
        ("g-nets of type", {slot.hypernet.type for slot in slots} - {*TYPES}),
        ("weights of", {tensor.dtype for tensor in plan.tensors} - {*DTYPES}),
    )
    for what, others in found:
        if others:
            raise ValueError(f"not in the browser yet: {what} {', '.join(sorted(others))}".rstrip())
    if plan.pnet_params > MOST_WEIGHTS:
        raise ValueError(f"a browser grows up to {MOST_WEIGHTS:,} weights, the network has {plan.pnet_params:,}")


def page(
    genome: bytes = b"",
    alphabets: Mapping[str, str] = MappingProxyType({}),
    networks: Mapping[str, JSON] = MappingProxyType({}),
) -> str:
    """The page with a genome, which is shown if the page's address has none in its fragment.

    `alphabets` are the characters that language models write, by their names in genomes' files; `networks` are
    descriptions (`network`) of p-nets that the page does not know, by their names in files.
    """
    contents = {"genome": in_address(genome), "alphabets": dict(alphabets), "networks": dict(networks)}
    held = json.dumps(contents).replace("<", "\\u003c")
    parts = {"style": _source("page.css"), "embedded": held, "script": script(*NETWORK, "page.js")}
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _source("page.html"))


def network(layers: Sequence[Layer], said: Mapping[str, Any]) -> JSON:
    """Describe a p-net for a page by its `layers_in_a_row` and the options in the metadata of its genomes' files."""
    return {"layers": list(layers), "options": {k: said.get(k, {}) for k in ("task_config", "pnet_config")}}


def embedded(text: str) -> tuple[bytes, dict[str, str]]:
    """Read the genome's file and the alphabets from a page; `ValueError` for a text without a genome."""
    found = re.search(r'<script type="application/json" id="embedded">(.+)</script>', text)
    held = json.loads(found[1]) if found else {}
    if not held.get("genome"):
        raise ValueError("it is no page with a genome that gbfunc export wrote")
    return from_address(held["genome"]), held["alphabets"]


def from_address(fragment: str) -> bytes:
    """Undo `in_address`; `ValueError` for what is none."""
    return base64.b64decode(fragment + "=" * (-len(fragment) % 4), altchars=b"-_", validate=True)


def in_address(genome: bytes) -> str:
    """A genome's file as the fragment of an address: base64 (RFC 4648, section 5) without padding."""
    return base64.urlsafe_b64encode(genome).decode("ascii").rstrip("=")


def script(*names: str) -> str:
    """Some of the page's scripts in one, after the constants that they need."""
    constants = {
        "version": VERSION,
        "words": WORDS.decode("ascii"),
        "documents": base64.b64encode(_documents()).decode("ascii"),
        "magic": MAGIC.decode("ascii"),
        "exponent": EXPONENT,
        "piece": PIECE,
        "powers": POWERS,
        "steps": STEPS,
        "widths": [NARROWEST, WIDEST],
        "halvings": HALVINGS,
        "roots": ROOTS,
        "largest": LARGEST,
        "leastVariance": LEAST_VARIANCE,
        "mostWeights": MOST_WEIGHTS,
    }
    return "\n".join([f"const FORMAT = {json.dumps(constants)};", *map(_source, names)])


def _documents() -> bytes:
    """The documents that compact files refer to, as raw deflate with `WORDS`."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=WORDS)
    return packer.compress(DOCUMENTS) + packer.flush()


def _source(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
