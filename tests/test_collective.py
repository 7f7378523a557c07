"""Collectives in graphs, and what ranks do together when something is wrong: real processes that meet at a file."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import gbfunc as gb
from gbfunc.parallel import CollectiveError, Mesh
from gbfunc.parallel.mesh import failing
from gbfunc.trees import split_rows
from tests.support.rank_cases import pnet_of
from tests.support.rank_events import ROWS, narrow, of_dtypes
from tests.support.ranks import PATIENCE, launch, run_ranks
from tests.test_distributed import assert_equal

PROCESS = pytest.mark.process


@lru_cache
def events(world: int) -> list[dict[str, Any]]:
    return run_ranks(world, "rank_events:run_events", timeout=110)


def every(world: int, event: str) -> list[Any]:
    return [found[event] for found in events(world)]


WORLDS = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=PROCESS), pytest.param(4, marks=[PROCESS, pytest.mark.slow])]
)


@WORLDS
def test_a_gather_is_right_in_every_graph(world: int) -> None:
    assert len(ROWS) >= world
    for found in every(world, "gather_laws"):
        assert {k: off for k, off in found.items() if off > 1e-12} == {}
    # A rank that does not count gives zeros.
    assert all(set(found.values()) == {0.0} for found in every(world, "uncounted"))


@WORLDS
def test_ranks_with_other_options_are_told_which(world: int) -> None:
    for found in every(world, "configurations"):
        where = f"rank {world - 1} in it"
        assert found["same"] is None
        assert '"clip_norm": 0.5' in found["options"] and '"clip_norm": null' in found["options"]
        assert "optim.adamw.AdamW" in found["optimizer"] and "optim.adam.Adam" in found["optimizer"]
        assert re.search(r'"features": ?3.*, not .*"features": ?2', found["plan"])
        assert found["text"].endswith(f"{where} (...{'x' * 80}z, not ...{'x' * 80}y)\n")
        assert found["tensor"].endswith(f"{where}\n")


@WORLDS
def test_a_nan_on_one_rank_stops_or_skips_all(world: int) -> None:
    for found in every(world, "not_finite"):
        for placement in ("replicated", "sharded"):
            assert found[placement] == (False, True, 1)
            assert "loss nan" in found[f"{placement} raise"]


@WORLDS
def test_what_cannot_be_is_refused_in_words(world: int) -> None:
    for found in every(world, "refusals"):
        assert "train_step.gather(state)" in found["generate"]
        assert "train_step.shard(state)" in found["whole"]
        assert re.search(r"different from rank 0 are rank 1 in direct/0\.bias$", found["drift"])
        assert re.search(r"same torch\.manual_seed.*rank 1 in plan", found["plan"])
        for name, words in (("DDP", "(ddp.module)"), ("FSDP", "before wrapping it"), ("FSDP2", "before fully_shard")):
            whole, inside = found[name]
            assert words in whole and words in inside and "at '0'" in inside
        assert "needs microbatches=1" in found["remat"] and "placement='factors'" in found["lazy"]
        assert "got 'elsewhere'" in found["placement"]
        assert "must be scalars" in found["aux"] and "global batch is empty" in found["empty"]
        assert "aux must have the same entries on all ranks" in found["entries"]
        assert 'rank 1 in what requires grad ({"0.bias": false, ' in found["frozen"]
        assert "rank 1 in training mode" in found["modes"]
        assert "batch must have tensors, to split its rows, got a SimpleNamespace" in found["object"]


@WORLDS
def test_dropout_differs_between_ranks_and_noise_does_not(world: int) -> None:
    first, second = every(world, "randomness")[:2]
    assert not torch.equal(first["dropout"], second["dropout"])
    torch.testing.assert_close(first["noise"], second["noise"], rtol=1e-12, atol=1e-12)


@WORLDS
def test_batch_norm_buffers_are_averaged_by_rows(world: int) -> None:
    found = every(world, "batch_norm")
    assert all(float(f["direct"]["0.bias"][0]) == 0.0 for f in found), "direct parameters are rank 0's"
    means = [0.1 * out.mean(0) for out in found[0]["outputs"]]
    expected = (3 * means[0] + 2 * means[1]) / 5
    for f in found:
        torch.testing.assert_close(f["buffers"]["1.running_mean"], expected)
        assert int(f["buffers"]["1.num_batches_tracked"]) == 1


@pytest.mark.process
def test_bytes_are_those_of_the_placement() -> None:
    """Two ranks in float64: a gather sends each tile or factor once, backward as many bytes; the rest is one sum."""
    plan = gb.make_plan(pnet_of(), gb.periodic(1), max_tile=(4, 4))
    tiles = sum(e.n_tiles * e.dims.rows * e.dims.cols for e in plan.ensembles)
    factors = sum(e.n_tiles * (e.dims.rows + e.dims.cols) * 2 for e in plan.ensembles)
    biases, head = 14 + 5, 4  # rows, squared norm, loss, aux
    found = every(2, "sent")
    for placement, numbers in (("sharded", tiles), ("factors", factors)):
        assert sum(f[placement]["gnets"] for f in found) == 2 * 8 * numbers
        assert all(f[placement]["world"] == 8 * (biases + head) for f in found)
    assert all(f["replicated"] == {"world": 8 * (plan.genome_params + head)} for f in found)


@WORLDS
def test_tiles_of_a_narrow_p_net_travel_narrow(world: int) -> None:
    expected = narrow(None)
    found = every(world, "narrow")
    for f in found:
        assert f["weights"].dtype == torch.bfloat16 and torch.equal(f["weights"], expected["weights"])
        for e, leaves in expected["genome"].items():
            for k, leaf in leaves.items():
                torch.testing.assert_close(f["genome"][e][k], leaf, rtol=2e-2, atol=2e-2)
    plan = gb.make_plan(pnet_of().bfloat16(), gb.gnet((3,)), max_tile=(4, 4))
    tiles = sum(e.n_tiles * e.dims.rows * e.dims.cols for e in plan.ensembles)
    assert sum(f["sent"] for f in found) == 2 * 2 * tiles * (world - 1)


@WORLDS
def test_complex_and_half_precision_numbers_are_summed_whole(world: int) -> None:
    """Imaginary parts take part, and a loss times its rows may be larger than float16 has numbers."""
    expected = of_dtypes(None)
    for found in every(world, "of_dtypes"):
        for name, of_one in expected.items():
            of_one = of_one | ({"reports": []} if "local" in name else {})
            assert_equal(found[name], of_one, 2e-2 if name == "half" else 1e-5)


@pytest.mark.process
@pytest.mark.parametrize("how", ["killed", pytest.param("stuck", marks=pytest.mark.slow)])
def test_a_missing_rank_ends_all_others_within_the_timeout(how: str, tmp_path: Path) -> None:
    # Torch's own timeout is half an hour: who waits for that is ended before.
    arguments = {"victim": 1, "how": how, "timeout": 8.0 * PATIENCE}
    ended = launch(3, "rank_events:die", tmp_path, 100, arguments)
    for rank in (0, 2):
        assert ended[rank][0] == 0, ended[rank]
        words = torch.load(tmp_path / f"result-{rank}.pt", weights_only=False)
        assert f"rank {rank} of 3" in words and "another rank died or is stuck" in words


GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:51606: Connection reset by peer."
OF_BACKENDS = [
    RuntimeError(GLOO),
    RuntimeError("[enforce fail at ../third_party/gloo/gloo/allreduce.cc:80] opts.elements > 0. "),
    RuntimeError("Application timeout caused pair closure"),
    dist.DistBackendError("NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, remote process exited"),
    dist.DistStoreError("wait timeout after 8000ms, keys: /alive/1"),
]
OF_USERS = ["nothing stored yet", "the Store is closed", "Connection closed by peer", "my gloo: ProcessGroup of NCCL"]
OF_USERS += ["Timed out waiting for the simulator", "[loader.cc:12] no such file", ""]
OF_USERS += ["[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"]


@pytest.mark.parametrize("error", [*OF_BACKENDS, *map(RuntimeError, OF_USERS)], ids=repr)
def test_errors_of_a_backend_alone_are_a_failed_collective(error: RuntimeError) -> None:
    with pytest.raises((CollectiveError, RuntimeError)) as caught, failing("gather", 0, 2, 1.0):
        raise error
    if error in OF_BACKENDS:
        assert isinstance(caught.value, CollectiveError) and caught.value.__cause__ is error
        assert "rank 0 of 2: gather failed or timed out" in str(caught.value)
    else:
        assert caught.value is error


@given(st.integers(0, 20), st.integers(1, 7))
def test_shards_cover_the_batch(rows: int, ranks: int) -> None:
    batch = {"x": torch.arange(rows), "y": torch.ones(()), "z": "text"}
    shards = split_rows(batch, ranks)
    assert torch.equal(torch.cat([s["x"] for s in shards]), batch["x"])
    lengths = [len(s["x"]) for s in shards]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert all(s["y"] is batch["y"] and s["z"] == "text" for s in shards)


def test_without_a_process_group_there_is_one_rank() -> None:
    for mesh in (gb.mesh(), Mesh({})):
        with mesh:
            batch = torch.ones(3)
            assert (mesh.world, mesh.rank, mesh.data, mesh.gnets) == (1, 0, 1, 1) and mesh.shard_batch(batch) is batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": 2}, "must be the number of ranks, 1, got data 2"),
        ({"data": 0}, "data must be an int >= 1"),
        ({"gnets": 1.5}, "gnets must be an int >= 1"),
        ({"timeout": 0}, "timeout must be seconds > 0"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gb.mesh(**options)
