"""The genome as an `nn.Module`, for whatever trains modules: loops, `Trainer`, `Accelerate`, DDP, `torch.compile`.

    parameters (the genome's leaves) --generate--> weights --the p-net's forward--> outputs

The functional side stays the core: a forward is the same generation and the same call as in a training step, so losses
and gradients are the same, bit for bit on the same path.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generate import make_generator
from gbfunc.genome import Noise, check_genome, check_plan, init_genome, sample_noise, unflat_genome
from gbfunc.plan import Plan
from gbfunc.pnet import RunnableNet, copy_of, keep_statistics, skeleton_of, without_sparse
from gbfunc.storage.hub import load_pretrained, push_pretrained, save_pretrained
from gbfunc.trees import DIRECT, GNET, tree_leaves
from gbfunc.types import Genome, GenomeLike, Lazy, Params

Self = TypeVar("Self", bound="GenomeModule")

_OTHER_PLAN = (
    "the state dict is that of another plan, under which its numbers make other weights: a plan depends on its p-net's "
    "first weights, so keep it (gb.save, save_pretrained, Plan.to_json); dict(state_dict) is loaded all the same"
)
_MATERIALIZE = "gb.materialize(plan, module.to_genome(), pnet) is a p-net with weights"


class _Frame(NamedTuple):
    """What a module is built of beside its tensors; the p-net is without its weights."""

    plan: Plan
    pnet: nn.Module
    base: BaseTensors | None
    lazy: Lazy

    def freeze_statistics(self, net: nn.Module) -> None:
        """Put what would change the base's statistics in training mode into evaluation mode."""
        if self.base is not None:
            keep_statistics(net, self.base.buffer_names)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frame:
        # Nothing writes to a base: copies share it.
        return _Frame(self.plan, copy_of(self.pnet, memo), self.base, self.lazy)


def _register(root: nn.Module, path: str, tensor: Tensor, persistent: bool | None = None) -> tuple[nn.Module, str]:
    """Register a parameter, or a buffer that is `persistent` or not, by its path: its module, and its name in that."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    if persistent is None:
        root.register_parameter(name, nn.Parameter(tensor, tensor.requires_grad))
    else:
        root.register_buffer(name, tensor, persistent)
    return root, name


class GenomeModule(nn.Module):
    """A genome as a module: its parameters are the genome's leaves, its forward runs the p-net on generated weights.

    Whatever trains modules trains it, and sees the genome alone: an optimizer's state, DDP's all-reduce and a state
    dict have its size. Names in the state dict are `gnets.<ensemble>.<leaf>`, `direct.<name in the p-net>`, and
    `buffer.<name in the p-net>` for the p-net's buffers. One of torch's own files is refused by a module of another
    plan, whose numbers mean other weights; in a safetensors file it does not say its plan.

    `train()` and `eval()` reach the p-net's dropout and batch norms, whose running statistics a forward in training
    mode updates. Stochastic g-nets draw from torch's default generator in training mode, and give their mean in
    evaluation mode. Direct parameters that do not require grad in the p-net do not here.

    A base is neither parameter nor buffer of the module, nor in its state dict; it is on the device of the genome.
    Its batch norms stay in evaluation mode, and copies of the module share it until they are cast (`half()`).

    The p-net's plain attributes (`config`, `main_input_name`) can be read, its tensors, parts and methods in `run`
    alone: it has no weights of its own. `forward` has the p-net's signature. One forward generates all weights once.

    Args:
        plan: the plan.
        pnet: the p-net that it was made for, and the base of a plan that has one; it is not changed. The module starts
            in its training mode.
        genome: a `Genome` or `TrainState`, of which copies are taken; None draws a fresh one.
        seed: of a fresh genome.
        lazy: whether weights stay factors, as in `make_train_step`. `torch.compile` of torch 2.5 needs False.

    Raises:
        TypeError: for a p-net or a genome that is none.
        ValueError: if plan, p-net and genome do not fit together, the p-net is not the plan's base, or it is wrapped
            (DDP, FSDP, compiled).

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(30, 20)
    >>> module = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(features=2)), pnet)
    >>> [name for name, _ in module.named_parameters()][-1], tuple(module(torch.ones(3, 30)).shape)
    ('direct.bias', (3, 20))
    """

    def __init__(
        self, plan: Plan, pnet: nn.Module, genome: GenomeLike | None = None, *, seed: int = 0, lazy: Lazy = "auto"
    ) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"GenomeModule takes (plan, pnet), the plan from gb.make_plan, got {type(plan).__name__}")
        if lazy not in (True, False, "auto"):
            raise ValueError(f"lazy must be one of {(True, False, 'auto')}, got {lazy!r}")
        super().__init__()
        check_plan(plan, pnet)
        if genome is None:
            genome = init_genome(plan, pnet, seed)
        check_genome(plan, genome)
        self._frame = _Frame(plan, skeleton_of(pnet), plan.base_tensors(pnet), lazy)
        self._frame.freeze_statistics(self._frame.pnet)
        frozen = {name for name, x in pnet.named_parameters() if not x.requires_grad}
        persistent = {b.name: b.persistent for b in plan.buffers}
        for part in ("gnets", "direct", "buffer"):
            self.add_module(part, nn.Module())

        def leaf(path: str, x: Tensor, trained: bool = True) -> tuple[nn.Module, str]:
            return _register(self, path, x.detach().clone().requires_grad_(trained))

        ensembles = genome.gnets.items()
        self._leaves = {f"{GNET}{e}/{k}": leaf(f"gnets.{e}.{k}", x) for e, xs in ensembles for k, x in xs.items()}
        self._leaves |= {f"{DIRECT}{k}": leaf(f"direct.{k}", x, k not in frozen) for k, x in genome.direct.items()}
        copies = {k: x.detach().clone() for k, x in genome.buffers.items()}
        self._kept = {k: _register(self, f"buffer.{k}", x, persistent[k]) for k, x in copies.items()}
        super().train(pnet.training)
        self._build()

    @classmethod
    def from_genome(cls: type[Self], plan: Plan, genome: GenomeLike, pnet: nn.Module, **options: Any) -> Self:
        """The module of a genome, of which copies are taken: `GenomeModule(plan, pnet, genome, **options)`."""
        return cls(plan, pnet, genome, **options)

    def to_genome(self) -> Genome:
        """The genome as it is now: copies without a graph, for `gb.save`, `gb.generate` and `gb.materialize`.

        Of a module under `fully_shard` (FSDP2) the shards are gathered: all ranks must call it.
        """
        leaves, buffers = ({k: _gathered(x.detach()).clone() for k, x in part.items()} for part in self._tensors())
        return unflat_genome(self.plan, leaves, buffers)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._frame.plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The p-net's output on the weights that the genome generates now.

        Raises:
            ValueError: if the p-net checkpoints inside its forward.
        """
        return self._on_weights(self._net, *args, **kwargs)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(net, *args, **kwargs)`, where `net` is the p-net on the generated weights with all that it has.

        So a loss function of `gb.make_train_step` can be used here: `module.run(loss_fn, batch).backward()`, or a part
        of the p-net be called: `module.run(lambda net: net.encoder(x))`. Wrappers that act on `forward` (DDP) do not
        see it.

        Raises:
            RuntimeError: for what would change the p-net (see `GrownNet`).
            ValueError: as `forward`.
        """
        return self._on_weights(self._net.run, function, *args, **kwargs)

    def _on_weights(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the p-net on the weights that the genome generates now; buffers are those after it."""
        leaves, buffers = self._tensors()
        if not torch.compiler.is_compiling() and any(map(_is_shard, leaves.values())):
            raise RuntimeError(
                "the genome is sharded during this call: give fully_shard the whole module, and call the module itself"
            )
        weights = self._generator(leaves, self._noise(leaves))
        after = dict(buffers)
        out = call(weights, after, *args, **kwargs)
        for name, x in after.items():
            if x is not buffers[name]:
                # Assigned, not changed in place, maybe with a graph, which must not live from call to call.
                setattr(*self._kept[name], x.detach())
        return out

    def train(self: Self, mode: bool = True) -> Self:
        """Set the training mode, of the p-net too."""
        super().train(mode)
        for net in (self._frame.pnet, self._net.skeleton):
            net.train(mode)
            self._frame.freeze_statistics(net)
        return self

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: backward would recompute without the generated weights.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a p-net on generated weights cannot checkpoint inside its forward; lazy=True keeps factors instead of "
            "weights, and gb.make_train_step(remat='layer') makes weights again in backward"
        )

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> str | None:
        """Write a folder as the Hugging Face hub has them: `genome.safetensors`, `config.json` and a model card.

        Args:
            save_directory: the folder; it is made where there is none.
            options: `dtype`, as in `gb.save`; `push_to_hub=True` with `repo_id` (the folder's name if not given) and
                the options of `push_to_hub`.

        Returns:
            The commit's address with `push_to_hub=True`, else None.

        Raises:
            ImportError: for an upload without the package huggingface_hub.
            TypeError: for an unknown option.
            ValueError: if the plan cannot be saved (see `gb.save`).
        """
        return save_pretrained(self.plan, self.to_genome(), save_directory, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes.

        Args:
            repo_id: its name on the hub.
            options: `dtype`, as in `gb.save`; and those of `huggingface_hub.ModelHubMixin.push_to_hub`: `private` (of
                a repository that is made for it), `token`, `branch`, `commit_message`, `create_pr`, `allow_patterns`,
                `ignore_patterns`, `delete_patterns`.

        Returns:
            The commit's address.

        Raises:
            ImportError, TypeError, ValueError: as `save_pretrained`.
        """
        return push_pretrained(self.plan, self.to_genome(), repo_id, **options)

    @classmethod
    def from_pretrained(
        cls: type[Self],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        pnet: nn.Module | None = None,
        lazy: Lazy = "auto",
        factories: Sequence[Callable[..., Any]] = (),
        **options: Any,
    ) -> Self:
        """The module of a folder, or of a name on the hub, that `save_pretrained` or `push_to_hub` wrote.

        Args:
            pretrained_model_name_or_path: the folder or name.
            pnet: the p-net that the genome was made for; where it has a base, with the base's weights.
            lazy: as in the constructor.
            factories: as in `gb.load`.
            options: of `huggingface_hub.hf_hub_download` (`revision`, `token`, `cache_dir`, ...).

        Raises:
            FileNotFoundError: if there is no such folder or name, or it has no genome.
            ImportError: for a name on the hub without the package huggingface_hub.
            TypeError: without `pnet`.
            ValueError: if the genome is not valid, or the p-net is not its.
        """
        if pnet is None:
            raise TypeError(
                "from_pretrained needs pnet=, the module that the genome was made for: a genome holds no architecture"
            )
        plan, genome = load_pretrained(pretrained_model_name_or_path, factories, **options)
        module = cls(plan, pnet, genome, lazy=lazy)
        return module.to(next((x.device for x in pnet.parameters() if not x.is_meta), None))

    def _refuse_script(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"torch.jit can neither script nor trace a GenomeModule; gb.export can, and {_MATERIALIZE}")

    __prepare_scriptable__ = _slow_forward = _refuse_script

    def extra_repr(self) -> str:
        """The p-net and both sizes."""
        sizes = f"{self.plan.genome_params:,} parameters of the genome, {self.plan.pnet_params:,} of the p-net"
        return f"{type(self._frame.pnet).__name__}: {sizes}"

    def _tensors(self) -> tuple[Params, Params]:
        """The genome's leaves, flat by name, and buffers as they are now."""
        leaves, buffers = ({k: getattr(*place) for k, place in x.items()} for x in (self._leaves, self._kept))
        return leaves, buffers

    def _noise(self, leaves: Params) -> Noise | None:
        drawn = self.training and self.plan.stochastic
        return _drawn(self.plan, next(iter(leaves.values()))) if drawn else None  # pyright: ignore[reportCallIssue]

    def _build(self) -> None:
        """Make what is not kept in a copy or a pickle."""
        plan, pnet, base, lazy = self._frame
        self._generator = make_generator(plan, pnet=pnet, lazy=lazy, base=base)
        self._net = RunnableNet(pnet, self._generator.forms, frozen=base)
        without_sparse(self._net.skeleton, {name for t in plan.generated for name in (t.name, *t.aliases)})
        self._prepare()
        if type(self).forward is GenomeModule.forward:
            signed: Any = _with_signature(type(self), pnet)
            self.__class__ = signed

    def _prepare(self) -> None:
        """Constants for the device of the leaves; a compiled forward cannot make them."""
        self._generator.prepare(self._tensors()[0])

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._frame.base is not None and (base := self._frame.base.cast(fn)) is not None:
            self._frame = self._frame._replace(base=base)
            self._build()
        self._prepare()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # What names and shapes do not say: scales, codes, activations.
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["plan"] = self.plan.digest()

    def _load_from_state_dict(self, state: Any, prefix: str, note: Any, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, note, *args)
        if note.get("plan") not in (None, self.plan.digest()):
            args[-1].append(_OTHER_PLAN)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            net = self.__dict__.get("_net")
            if net is None or name.startswith("_") or not hasattr(net.skeleton, name):
                raise
        value = getattr(net.skeleton, name)
        if isinstance(value, torch.device):
            return next((x.device for x in self.parameters()), value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            raise AttributeError(f"{name!r} of the p-net works on weights, which it does not have here: {_MATERIALIZE}")
        items = list(value) if isinstance(value, set | frozenset) else value
        if any(isinstance(x, Tensor | nn.Module) for _, x in tree_leaves(items)):
            raise AttributeError(f"{name!r} of the p-net has no values here: {_MATERIALIZE}")
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (_plain_class(type(self)),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k not in ("_generator", "_net")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()


def _is_shard(x: Any) -> bool:
    return type(x).__name__ == "DTensor"  # whose import takes a while


def _gathered(x: Any) -> Tensor:
    """A tensor as a whole, of which each rank has a shard."""
    return x.full_tensor() if _is_shard(x) else x


@torch.compiler.disable
def _drawn(plan: Plan, like: Tensor) -> Noise:
    """Noise from torch's default generator, which no graph can hold."""
    return sample_noise(plan, torch.default_generator, like)


def _with_signature(cls: type[GenomeModule], pnet: nn.Module) -> type[GenomeModule]:
    """A subclass whose forward shows the p-net's signature: trainers choose columns of a data set by it."""
    try:
        given = inspect.signature(pnet.forward)
    except (TypeError, ValueError):
        return cls
    try:
        return _class_of(_plain_class(cls), given)
    except TypeError:
        # A default that cannot be hashed.
        return _class_of.__wrapped__(_plain_class(cls), given)


@functools.lru_cache
def _class_of(plain: type[GenomeModule], given: inspect.Signature) -> type[GenomeModule]:
    """One class for each signature, so that modules of a plan can be stacked (`torch.func.stack_module_state`)."""

    def forward(self: GenomeModule, *args: Any, **kwargs: Any) -> Any:
        return GenomeModule.forward(self, *args, **kwargs)

    forward.__doc__ = GenomeModule.forward.__doc__
    rest = [p for p in given.parameters.values() if p.name != "self"]
    first = inspect.Parameter("self", min([inspect.Parameter.POSITIONAL_OR_KEYWORD, *(p.kind for p in rest)]))
    forward.__signature__ = given.replace(parameters=[first, *rest])  # pyright: ignore[reportFunctionMemberAccess]
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (plain,), {**names, "forward": forward, "_plain": plain})


def _plain_class(cls: type[GenomeModule]) -> type[GenomeModule]:
    """The class that a user can name, of one that `_with_signature` made."""
    return cls.__dict__.get("_plain", cls)


def _blank(cls: type[GenomeModule]) -> GenomeModule:
    return cls.__new__(cls)
