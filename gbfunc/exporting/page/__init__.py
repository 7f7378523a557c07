"""Builds a page that generates and runs a genome's network in the browser: one HTML file that needs no server.

The page's JavaScript reads a genome's file (`read.js`, `bytes.js`, `steps.js`), checks the plan against the format's
schema and limits (`plan.js`), generates the weights (`grow.js`), runs the p-nets of the command line and p-nets that
`layers_in_a_row` describes (`networks.js`), and shows the result (`figures.js`, `images.js`, `page.js`). The function
`script` copies the constants of the formats from Python into the page.
"""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from torch import nn

from gbfunc.formats.compact import EXPONENT, MAGIC, STEPS
from gbfunc.formats.layout import DOCUMENTS, SCHEMA
from gbfunc.formats.statistics import LEAST_VARIANCE
from gbfunc.formats.steps import COARSEST, FINEST, LARGEST
from gbfunc.formats.symbols import HALVINGS, NARROWEST, PIECE, POWERS, ROOTS, WIDEST
from gbfunc.plan import Plan
from gbfunc.plan.serial import VERSION
from gbfunc.types import JSON
from gbfunc.untrusted import parse_json

Layer = list[Any]
"""A layer as JSON: its name in `networks.js`, and its options."""

NETWORK = ("read.js", "bytes.js", "plan.js", "steps.js", "grow.js", "networks.js")
"""Scripts that read a genome's file and run the network. Unlike the page's other scripts, they need no browser."""

PNETS = ("mlp", "convnet", "lenet5", "allconv", "resnet20", "resnet56", "gpt")
TYPES = ("periodic", "bilinear", "low_rank", "xox", "constant", "gnet", "stochastic")
DTYPES, MOST_WEIGHTS = ("float32", "float64"), 64_000_000
"""Limits of the page: names of p-nets, types of g-net, dtypes, and the largest number of weights."""


def check(plan: Plan) -> None:
    """Raise `ValueError` for a genome whose network a page cannot generate."""
    if plan.base is not None:
        raise ValueError("not in the browser yet: a genome that changes a pretrained network; export to .onnx")
    if others := {slot.hypernet.type for tensor in plan.tensors for slot in tensor.slots} - {*TYPES}:
        raise ValueError(f"not in the browser yet: g-nets of type {', '.join(sorted(others))}; export to .onnx")
    if others := {tensor.dtype for tensor in plan.tensors} - {*DTYPES}:
        raise ValueError(f"not in the browser yet: weights of {', '.join(sorted(others))}; export to .onnx")
    if plan.pnet_params > MOST_WEIGHTS:
        raise ValueError(f"a browser grows up to {MOST_WEIGHTS:,} weights, got {plan.pnet_params:,}; export to .onnx")


def page(
    genome: bytes = b"",
    alphabets: Mapping[str, str] = MappingProxyType({}),
    networks: Mapping[str, JSON] = MappingProxyType({}),
) -> str:
    """Return the page as HTML. The page shows `genome`, unless the page's address has another genome after "#".

    `alphabets` has the characters of each language model, and `networks` the descriptions (`network`) of p-nets that
    the page's scripts do not know. The keys are the values of `alphabet` and `pnet` in genome files' metadata.
    """
    contents = {"genome": in_address(genome), "alphabets": dict(alphabets), "networks": dict(networks)}
    blocks = {"style": _source("page.css"), "embedded": json.dumps(contents).replace("<", "\\u003c")}
    blocks["script"] = script(*NETWORK, "figures.js", "images.js", "page.js")
    return re.sub(r"{{(\w+)}}", lambda match: blocks[match[1]], _source("page.html"))


def network(layers: Sequence[Layer], metadata: Mapping[str, Any]) -> JSON:
    """Return one of `page`'s `networks`: layers (see `layers_in_a_row`), and options from a genome file's metadata."""
    return {"layers": list(layers), "options": {k: metadata.get(k, {}) for k in ("task_config", "pnet_config")}}


def embedded(text: str) -> tuple[bytes, dict[str, str]]:
    """Extract a genome's file and the alphabets from a page's HTML; ValueError if the text has no genome."""
    found = re.search(r'<script type="application/json" id="embedded">(.+)</script>', text)
    content = parse_json(found[1], "the page's content") if found else None
    genome, alphabets = (content.get(k) for k in ("genome", "alphabets")) if isinstance(content, dict) else ("", {})
    if not (genome and isinstance(genome, str) and isinstance(alphabets, dict)):
        raise ValueError("expected a page with a genome, from gbfunc export, got another text")
    return from_address(genome), alphabets


def from_address(fragment: str) -> bytes:
    """Decode the text of `in_address`; raise `ValueError` for any other text."""
    return base64.b64decode(fragment + "=" * (-len(fragment) % 4), altchars=b"-_", validate=True)


def in_address(genome: bytes) -> str:
    """Encode a genome's file as the fragment of an address: base64 (RFC 4648, section 5) without padding."""
    return base64.urlsafe_b64encode(genome).decode("ascii").rstrip("=")


def script(*names: str) -> str:
    """Return JavaScript: the constants of the formats, followed by the scripts with these names."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    documents = base64.b64encode(packer.compress(DOCUMENTS) + packer.flush()).decode("ascii")
    texts = {"documents": documents, "magic": MAGIC.decode("ascii"), "schema": SCHEMA}
    runs = {"exponent": EXPONENT, "piece": PIECE, "powers": POWERS, "roots": ROOTS, "halvings": HALVINGS}
    steps = {"widths": [NARROWEST, WIDEST], "largest": LARGEST, "finer": [COARSEST, FINEST], "version": VERSION}
    limits = {"steps": STEPS, "leastVariance": LEAST_VARIANCE, "mostWeights": MOST_WEIGHTS}
    constants = json.dumps(texts | runs | steps | limits, separators=(",", ":"))
    return "\n".join([f"const FORMAT = {constants};", *map(_source, names)])


def _source(name: str) -> str:
    return re.sub("(?m)^ +", "", files(__name__).joinpath(name).read_text(encoding="utf-8"))


def layers_in_a_row(pnet: nn.Module) -> list[Layer]:
    """Describe the layers of an `nn.Sequential` (also nested) in evaluation mode; ValueError for any other p-net."""
    return list(_walk(pnet, "", {module: name for name, module in pnet.named_modules()}))


def _walk(module: nn.Module, name: str, names: Mapping[nn.Module, str]) -> Iterator[Layer]:
    if type(module).forward is nn.Sequential.forward:
        for child in module._modules.values():
            assert child is not None
            # If a module occurs several times, use the first name, under which `named_buffers` lists its buffers.
            yield from _walk(child, names[child], names)
        return
    describe = _LAYERS.get(type(module))
    hooked = ", with a hook" if module._forward_hooks or module._forward_pre_hooks else ""
    if describe is None or hooked or not name:
        what = (f"{name!r}, {module}" if name else f"a p-net of type {type(module).__name__}") + hooked
        known = ", ".join(kind.__name__ for kind in _LAYERS)
        raise ValueError(f"a page runs an nn.Sequential of {known} without hooks, got {what}")
    layer = describe(module, name)
    if layer is None:
        raise ValueError(f"a page supports only usual options of layers, got {name!r}, {module}: export to .onnx")
    if layer:
        yield layer


def _conv(conv: nn.Conv2d, name: str) -> Layer | None:
    padding = [0, 0] if conv.padding == "valid" else conv.padding
    if padding == "same":
        around = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = None if any(n % 2 for n in around) else [n // 2 for n in around]
    if padding is None or conv.padding_mode != "zeros":
        return None
    return ["conv", name, list(conv.stride), list(padding), list(conv.dilation)]


def _pool(pool: Any, name: str) -> Layer | None:
    if isinstance(pool, nn.MaxPool2d):
        kind, unusual = "max_pool", pool.return_indices or pool.dilation not in (1, (1, 1))
    else:
        padded = pool.padding not in (0, (0, 0)) and not pool.count_include_pad
        kind, unusual = "avg_pool", pool.divisor_override or padded
    return None if unusual or pool.ceil_mode else [kind, pool.kernel_size, pool.stride, pool.padding]


def _norm(norm: Any, name: str) -> Layer | None:
    if isinstance(norm, nn.LayerNorm):
        learnt = name if norm.elementwise_affine else None
        return ["layer_norm", learnt, norm.eps] if len(norm.normalized_shape) == 1 else None
    return ["batch_norm", name, norm.eps] if norm.running_var is not None else None


_LAYERS: Mapping[type[nn.Module], Callable[[Any, str], Layer | None]] = {
    nn.Linear: lambda m, name: ["linear", name],
    nn.Conv2d: _conv,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm), _norm),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d), _pool),
    nn.AdaptiveAvgPool2d: lambda m, name: ["means"] if m.output_size in (1, (1, 1)) else None,
    nn.Flatten: lambda m, name: ["flatten"] if (m.start_dim, m.end_dim) == (1, -1) else None,
    **dict.fromkeys((nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU), lambda m, name: [type(m).__name__.lower()]),
    nn.GELU: lambda m, name: ["gelu" if m.approximate == "none" else "gelu_tanh"],
    **dict.fromkeys((nn.Dropout, nn.Dropout2d, nn.Identity), lambda m, name: []),
}
"""{type: function that describes a layer}: [] for a layer without effect in evaluation, None if not supported."""
