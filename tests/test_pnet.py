"""The p-net as a pure function: the same as the module itself, and a refusal of what cannot be one."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.pnet.describe import buffers_of, check_pnet, eval_mode_warning, parameter_infos, with_weights
from gbfunc.pnet.pure import PureNet
from tests.support.trees_equal import copy_tree, photograph, same_bits
from tests.support.zoo import BUFFERS_ONLY, ZOO, Animal, dtype_of, loss_fn, mlp

ALL = {**ZOO, "buffers_only": BUFFERS_ONLY}
EACH = pytest.mark.parametrize("animal", ALL.values(), ids=ALL)


def other_tensors(pnet: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    weights = {
        o.name: torch.randn(o.tensor.shape, generator=draw).to(o.tensor.dtype) * 0.3 for o in parameter_infos(pnet)
    }
    return weights, {name: b.clone() + 1 for name, (b, _) in buffers_of(pnet).items()}


def run(call: Callable[[Tensor], Any], weights: list[Tensor], batch: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        loss = loss_fn(call, batch)
    return loss.detach(), torch.autograd.grad(loss, weights) if weights else ()


@EACH
def test_pure_net_equals_the_module_that_holds_the_same_tensors(animal: Animal) -> None:
    pnet = animal.pnet()
    before = photograph(pnet)
    weights, buffers = other_tensors(pnet)
    module = with_weights(pnet, weights, buffers).requires_grad_()
    batch = animal.batch(dtype_of(pnet))

    own = copy_tree(buffers)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    net = PureNet(pnet)
    for _ in range(2):  # The first call is watched, later ones are not.
        pure = run(lambda x, own=own: net(leaves, own, x), list(leaves.values()), batch)
        plain = run(module, list(module.parameters()), batch)
        torch.testing.assert_close(pure, plain, rtol=0, atol=0)
        torch.testing.assert_close(own, dict(module.named_buffers()), rtol=0, atol=0)
        own = {name: b.detach() for name, b in own.items()}
        for name, buffer in own.items():
            module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.clone()
    assert same_bits({k: w.detach() for k, w in leaves.items()}, weights)
    assert same_bits(photograph(pnet), before)


def test_tied_parameters_are_listed_once_with_their_aliases() -> None:
    owned = {o.name: o.aliases for o in parameter_infos(ZOO["tied"].pnet())}
    assert owned == {"embedding.weight": ("head.weight",), "hidden.weight": (), "hidden.bias": ()}


def test_parametrised_weights_belong_to_their_layer() -> None:
    pnet = ZOO["weight_norm"].pnet()
    owned = {o.name: (type(o.module).__name__, o.attribute) for o in parameter_infos(pnet)}
    assert owned["0.parametrizations.weight.original1"] == ("ParametrizedLinear", "weight")
    alone = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    assert {(o.module is alone, o.attribute) for o in parameter_infos(alone)} == {(True, "bias"), (True, "weight")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.bias": None}, r"missing \['0.bias'\]"),
        ({"0.wieght": torch.zeros(7, 6)}, r"unknown \['0.wieght'\]"),
        ({"0.bias": torch.zeros(1)}, r"0.bias is \(1,\), expected \(7,\)"),
        ({"0.weight": torch.zeros(6, 7)}, r"0.weight is \(6, 7\), expected \(7, 6\)"),
    ],
    ids=["missing", "misspelt", "broadcastable", "transposed"],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    pnet = mlp()
    weights = {k: x for k, x in {**dict(pnet.named_parameters()), **change}.items() if x is not None}
    with pytest.raises(ValueError, match=words):
        PureNet(pnet)(weights, {}, torch.zeros(2, 6))
    pnet = ZOO["conv_bn"].pnet()
    with pytest.raises(ValueError, match="buffers do not fit the p-net: missing .*running_mean"):
        PureNet(pnet)(dict(pnet.named_parameters()), {}, torch.zeros(2, 2, 6, 6))


def refused(pnet: Any, words: str, error: type[Exception] = ValueError) -> None:
    for given in (pnet, nn.Sequential(nn.Linear(6, 6), pnet)) if isinstance(pnet, nn.Module) else (pnet,):
        for door in (check_pnet, gb.make_plan, PureNet):
            with pytest.raises(error, match=words):
                door(given)


def test_wrappers_are_refused() -> None:
    refused(nn.DataParallel(mlp()), r"DataParallel.*\.module")
    refused(torch.compile(mlp(), backend="eager"), r"OptimizedModule.*_orig_mod")
    names = {"FullyShardedDataParallel": "before", "FSDPModule": "before", "DistributedDataParallel": r"ddp\.module"}
    for name, cure in names.items():
        refused(type("Wrapped", (nn.Linear, type(name, (), {})), {})(6, 3), rf"{name}.*{cure}")


def test_what_is_no_ready_module_is_refused() -> None:
    refused(mlp, "must be an nn.Module, got function", TypeError)
    refused(nn.LazyLinear(3), "'(1.)?weight' is lazy and has no shape yet: run the p-net once")
    refused(nn.LazyBatchNorm1d(affine=False), "buffer '(1.)?running_mean' is lazy and has no shape yet")
    shared = nn.Linear(3, 2)
    shared.register_buffer("kept", shared.weight)
    refused(shared, r"'(1.)?weight' and '(1.)?kept' are two tensors in the same memory")


def test_parameters_in_the_memory_of_others_are_refused() -> None:
    pair: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for view in (pair[0].weight.t(), pair[0].weight, pair[0].weight[1:]):
        pair[1].weight = nn.Parameter(view)
        refused(pair, r"'(1.)?0.weight' and '(1.)?1.weight' are two tensors in the same memory.* self\.(1.)?0.weight")
    pair[1] = nn.Identity()
    pair.register_buffer("column", pair[0].weight.detach()[:, 0])
    refused(pair, r"'(1.)?0.weight' and '(1.)?column' are two tensors in the same memory")
    pair.column = torch.zeros(2, 3)
    pair.register_buffer("row", pair.column[1])
    refused(pair, r"'(1.)?column' and '(1.)?row' are two tensors in the same memory")


def test_parameters_may_have_their_places_in_one_storage() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.vector_to_parameters(torch.randn(24), net.parameters())
    check_pnet(net)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    pnet = mlp()
    vars(pnet)["lock"] = threading.Lock()
    with pytest.raises(ValueError, match=r"the p-net \(Sequential\) cannot be deep-copied"):
        PureNet(pnet)


def test_activations_that_a_forward_left_behind_do_not_hinder() -> None:
    class Remembers(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.last = super().forward(input)
            return self.last

    pnet = Remembers(6, 3)
    pnet(torch.ones(2, 6))
    weights = dict(pnet.named_parameters())
    torch.testing.assert_close(PureNet(pnet)(weights, {}, torch.ones(2, 6)), pnet.last)
    assert pnet.last.grad_fn is not None


class Wired(nn.Identity):
    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout


@pytest.mark.parametrize(
    ("module", "kinds"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout1d(0.5)), "Dropout, Dropout1d"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.BatchNorm1d(2)), "BatchNorm1d"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "MultiheadAttention"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), "LSTM"),
        (Wired(0.1), "Wired"),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GELU()), None),
        (nn.Sequential(nn.Dropout(0.0), nn.MultiheadAttention(4, 2), Wired(0.0)), None),
        (nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.PairwiseDistance(2.0)), None),
    ],
)
def test_eval_mode_is_told_where_all_that_it_changes_is_in_it(module: nn.Module, kinds: str | None) -> None:
    assert eval_mode_warning(module) is None
    before = photograph(module.eval())["modules"]
    told = eval_mode_warning(module)
    assert told is None if kinds is None else told is not None and f"eval mode and trains without {kinds}:" in told
    assert photograph(module)["modules"] == before
    mixed = nn.Sequential(module, nn.Dropout(0.1))
    assert eval_mode_warning(mixed) is None


class Keeps(nn.Linear):
    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__(6, 3)
        self.kept = keep(self.weight)


@pytest.mark.parametrize(
    "keep",
    [
        lambda w: [w],
        lambda w: {"w": (w.detach(),)},
        lambda w: w.detach()[1:],
        lambda w: w.t(),
        lambda w: w.detach().numpy()[:, 1:],
    ],
)
def test_attributes_in_the_memory_of_a_parameter_are_refused(keep: Callable[[Tensor], Any]) -> None:
    refused(Keeps(keep), r"the attribute '(1.)?kept' of the p-net shares memory with its parameter '(1.)?weight'")


@pytest.mark.parametrize("keep", [lambda w: w.detach().clone(), lambda w: w.shape, lambda w: w.detach().sum().numpy()])
def test_attributes_in_memory_of_their_own_are_let_be(keep: Callable[[Tensor], Any]) -> None:
    check_pnet(Keeps(keep))


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_mkldnn, lambda x: torch.nested.nested_tensor([x[0]])])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def test_buffers_that_no_file_can_hold_are_refused(make: Callable[[Tensor], Tensor]) -> None:
    pnet = nn.Linear(6, 3)
    pnet.register_buffer("mask", make(torch.eye(3)))
    refused(pnet, r"buffer '(1.)?mask' has the layout .*: make it dense")


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_is_refused(hook: str) -> None:
    pnet = nn.Sequential(nn.Linear(4, 4))
    handle = getattr(pnet[0].weight, hook)(lambda x: None)
    with pytest.raises(ValueError, match=r"'0.weight' has a hook on its gradient.*self.NAME.register_hook"):
        gb.make_plan(pnet)
    handle.remove()
    gb.make_plan(pnet)


def test_a_copy_that_is_the_module_itself_is_refused() -> None:
    class Shared(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    pnet = nn.Sequential(nn.Linear(4, 4), Shared(4, 2))
    with pytest.raises(ValueError, match="a deep copy of the p-net shares the module '1'"):
        PureNet(pnet)
