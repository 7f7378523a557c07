"""Trainers of modules train genomes: DDP and FSDP2 on two ranks, Hugging Face's Trainer, Accelerate."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.trees import flatten_tree
from tests.support.hugging_face import tiny
from tests.support.module_ranks import NAMES
from tests.support.ranks import run_ranks

ROWS, LENGTH, VOCABULARY, STEPS, RATE = 4, 8, 30, 4, 1e-2


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    return run_ranks(2, "tests.support.module_ranks:run")


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_ddp_trains_as_the_functional_step_does_and_sends_the_genome_alone(
    ranks: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank[name] for rank in ranks)
    losses = (first["losses"] + second["losses"]) / 2
    torch.testing.assert_close(losses, first["expected"], rtol=1e-5, atol=1e-6)
    assert first["sent"] == first["trained"]
    for leaf, x in first["genome"].items():
        assert torch.equal(x, second["genome"][leaf]), f"ranks differ in {leaf}"
        torch.testing.assert_close(x, first["state"][leaf], rtol=1e-5, atol=1e-5)


@pytest.mark.process
def test_fsdp_trains_as_the_functional_step_does_and_gives_the_whole_genome(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for leaf, x in rank["mlp"]["sharded"].items():
            torch.testing.assert_close(x, rank["mlp"]["state"][leaf], rtol=1e-5, atol=1e-5)


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2": (partial(tiny, "GPT2LMHeadModel", vocab_size=VOCABULARY), 0),
    "bert": (partial(tiny, "BertForSequenceClassification", vocab_size=VOCABULARY, num_labels=3), 3),
}


def rows_of(classes: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS * STEPS, LENGTH), generator=draw)
    labels = torch.randint(0, classes, (len(tokens),), generator=draw) if classes else tokens.clone()
    if not classes:
        # Nothing predicts the first token; Trainer counts it all the same.
        labels[:, 0] = -100
    return [{"input_ids": x, "labels": y, "noise": "x"} for x, y in zip(tokens, labels, strict=True)]


def batches_of(rows: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    for i in range(STEPS):
        part = rows[i * ROWS : (i + 1) * ROWS]
        yield {key: torch.stack([row[key] for row in part]) for key in ("input_ids", "labels")}


def functional(name: str) -> tuple[gb.Plan, nn.Module, list[Tensor], gb.TrainState]:
    make, classes = NETS[name]
    pnet = make()
    plan = gb.make_plan(pnet, gb.periodic(4), max_tile=16)
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=RATE, weight_decay=0.0)
    step = gb.make_train_step(plan, pnet, lambda net, batch: net(**batch).loss, optimizer)
    state, losses = step.init(0), []
    for batch in batches_of(rows_of(classes)):
        state, info = step(state, batch)
        losses.append(info.loss)
    return plan, pnet, losses, state


def assert_close(module: gb.GenomeModule, state: gb.TrainState) -> None:
    genome = module.to_genome()
    for part in ("gnets", "direct"):
        given, expected = flatten_tree(getattr(genome, part)), flatten_tree(getattr(state, part))
        for leaf, x in expected.items():
            torch.testing.assert_close(given[leaf], x, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.__version__ < "2.6", reason="transformers loads no optimizer with torch older than 2.6")
@pytest.mark.parametrize("name", NETS)
def test_the_trainer_trains_as_the_functional_step_does(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="Trainer is in transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    plan, pnet, expected, state = functional(name)
    module, losses = gb.GenomeModule(plan, pnet), []

    class Recorded(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            losses.append((found[0] if isinstance(found, tuple) else found).detach())
            return found

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    options: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": RATE}
    options |= {"lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0, "optim": "adamw_torch"}
    options |= {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "steps"}
    options |= {"save_steps": 2, "use_cpu": True, "dataloader_pin_memory": False}
    given = transformers.TrainingArguments(tmp_path, **options)
    rows = rows_of(NETS[name][1])
    trainer = Recorded(model=module, args=given, train_dataset=rows, eval_dataset=rows[:ROWS])
    trainer.train()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert_close(module, state)
    # Labels are known from the signature, so evaluation has a loss; a checkpoint holds the genome alone.
    losses.clear()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(losses[0]), rel=1e-5)
    assert not module.training
    size = (tmp_path / f"checkpoint-{STEPS}" / "model.safetensors").stat().st_size
    assert size < 4 * plan.genome_params + 4 * sum(x.numel() for x in module.buffers()) + 20_000
    other = gb.GenomeModule(plan, pnet, seed=1)
    again = Recorded(model=other, args=given, train_dataset=rows)
    losses.clear()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected[2:]), rtol=1e-5, atol=1e-5)


def test_accelerate_runs_the_pnet_in_bfloat16_and_returns_float32() -> None:
    accelerate = pytest.importorskip("accelerate", reason="it is what is tested")
    pnet = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    plan = gb.make_plan(pnet, gb.periodic(2))
    module, x = gb.GenomeModule(plan, pnet), torch.ones(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x).float()
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        net = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(module)
        out = net(x)
        out.sum().backward()
        assert out.dtype == torch.float32 and torch.equal(out, expected)
        assert all(p.grad is not None for p in module.parameters())
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
