"""Adapters of a pretrained p-net at equal bytes: each trains, fits, and is read back from its bytes and the base."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gbfunc.cli import main
from gbfunc.formats import bytes_each
from gbfunc.lab.compare import PRETRAINED_METHODS, REFERENCES, reference_problem
from gbfunc.lab.compare.adapters import ADAPTERS, FULL, Adapted
from gbfunc.lab.compare.base import HEAD, BudgetTooSmall, Method, Problem, Trained, unpack
from gbfunc.lab.compare.rows import measure
from gbfunc.tasks import Recipe, Split, Task, accuracy
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet
from notebooks.results import rivals

LAYERS, WIDTH, TOKENS, LENGTH, CLASSES, PAD = 3, 16, 50, 9, 4, 0
LADDERS = {**ADAPTERS, **rivals.ADAPTERS}
RIVALS = {**LADDERS, **REFERENCES}
EVERY = {**PRETRAINED_METHODS, **RIVALS}
PACKAGED = set(LADDERS) - {"linear_probe", "bitfit"}
NUMBERS = (torch.float32, torch.float16)
RECIPE = Recipe(batch_size=32, epochs=1, clip_norm=1.0)
BUDGET, FULL_BUDGET = 8_000, 60_000


class Classifier(nn.Module):
    """The mean of an encoder's outputs, and a classifier."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.pad = encoder, PAD
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        mask_BL = tokens_BL != PAD
        hidden_BLE = self.encoder(input_ids=tokens_BL, attention_mask=mask_BL.long()).last_hidden_state
        mask_BL1 = mask_BL[:, :, None].float()
        return self.classifier((hidden_BLE * mask_BL1).sum(1) / mask_BL1.sum(1))


def new_bert(seed: int = 0) -> nn.Module:
    """A BERT whose first weights are always the same, as a pretrained one's are, with a new classifier."""
    transformers = pytest.importorskip("transformers", reason="the p-net is Hugging Face's")
    sizes: dict[str, Any] = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2)
    config = transformers.BertConfig(
        **sizes, intermediate_size=32, vocab_size=TOKENS, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0
    )
    config.attention_probs_dropout_prob = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = transformers.BertModel(config, add_pooling_layer=False)
    return Classifier(encoder)


def texts(n: int, seed: int) -> Split:
    """Random tokens, padded, of classes that their first one decides."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, TOKENS, (n, LENGTH), generator=generator)
    ends = torch.randint(3, LENGTH - 1, (n, 1), generator=generator)
    return Split(torch.where(torch.arange(LENGTH) < ends, x, PAD), x[:, 0] % CLASSES)


@pytest.fixture(scope="module")
def task() -> Task:
    adapter = PlanOptions(base="own", modules_to_save=(HEAD,))
    pnet = PNet("bert", make=new_bert, plan=lambda size: adapter, config={"pretrained": "nowhere"})
    interface = Interface((LENGTH,), CLASSES)
    splits = (texts(64, 0), texts(40, 1), texts(40, 2))
    return Task("texts", interface, *splits, pnet, settings=lambda pnet, params: RECIPE)


def problem_of(task: Task, budget: int, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(task, budget // 4, budget, dtype, RECIPE)


def every(name: str) -> Method:
    if name in PACKAGED:
        pytest.importorskip("peft", reason="the adapter is of the package peft")
    return EVERY[name]


def rival(name: str) -> Adapted:
    method = every(name)
    assert isinstance(method, Adapted)
    return method


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, NUMBERS[0]) for name in EVERY] + [(name, NUMBERS[1]) for name in ("genome", "lora")]
)
def test_bytes_are_within_the_budget_and_enough_to_run(
    name: str, dtype: torch.dtype, task: Task, tmp_path: Path
) -> None:
    method = every(name)
    problem = problem_of(task, FULL_BUDGET if method is FULL else BUDGET, dtype)
    candidates = method.candidates(problem)
    assert json.loads(json.dumps(candidates)) == candidates
    assert len({json.dumps(c) for c in candidates}) == len(candidates)
    before = torch.get_rng_state()
    row = measure(name, method, problem, candidates[-1], 3, tmp_path / "net")
    assert torch.equal(torch.get_rng_state(), before)
    data = (tmp_path / "net").read_bytes()
    each = bytes_each(getattr(method, "stored", None) or dtype)
    assert row.bytes == len(data) <= problem.budget and 0 < row.params * each <= (1.25 if each < 1 else 1) * row.bytes
    assert accuracy(method.load(data, task), task.test) == row.test
    if dtype != NUMBERS[0]:  # Numbers are narrowed when all is trained.
        return
    # The same seed gives the same bytes, another one other bytes.
    assert method.train(problem, candidates[-1], 3) == Trained(data, row.params)
    assert method.train(problem, candidates[-1], 4).data != data


@pytest.mark.parametrize("name", RIVALS)
def test_what_is_read_back_is_what_was_trained(name: str, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    method, kept = rival(name), []
    attach = type(method).attach

    def keep(self: Any, net: nn.Module, settings: dict[str, Any]) -> nn.Module:
        kept.append(attach(self, net, settings))
        return kept[-1]

    problem = problem_of(task, FULL_BUDGET)
    settings = method.candidates(problem)[-1]
    monkeypatch.setattr(type(method), "attach", keep)
    # Another seed than that of the base which it is read back into.
    trained = method.train(problem, settings, 5)
    (net,) = kept
    loaded = method.load(trained.data, task)
    with torch.no_grad():
        expected = net.eval()(task.test.x)
        torch.testing.assert_close(loaded(task.test.x), expected, rtol=0, atol=0)
        assert not torch.allclose(task.build(5).eval()(task.test.x), expected, atol=1e-4)
    # Every trained number moves and is stored; the base stays.
    tensors = unpack(trained.data, method.state(method.attach(task.build(0), settings["adapter"])))
    assert sum(t.numel() for t in tensors.values()) == trained.params
    heads = [t for n, t in tensors.items() if HEAD in n]
    assert sorted(tuple(t.shape) for t in heads) == [(CLASSES,), (CLASSES, WIDTH)]
    assert all((t != 0).any() for t in tensors.values())
    if method is not FULL:
        assert isinstance(loaded, nn.Module)
        words = [p for n, p in loaded.named_parameters() if "word_embeddings" in n]
        assert torch.equal(words[0], next(p for n, p in task.build(0).named_parameters() if "word_embeddings" in n))


@pytest.mark.parametrize("name", RIVALS)
def test_what_cannot_be_so_small_says_so(name: str, task: Task) -> None:
    with pytest.raises(BudgetTooSmall, match=r"in float32 and with its classifier, takes [\d,]+ bytes"):
        rival(name).candidates(problem_of(task, 280))
    plain = replace(task, pnet=PNet("plain", make=lambda: nn.Sequential(nn.Linear(3, 3))))
    if name not in ("linear_probe", *REFERENCES):
        with pytest.raises(BudgetTooSmall, match="numbered blocks of linear layers, got none"):
            rival(name).candidates(problem_of(plain, BUDGET))


@pytest.mark.parametrize("name", LADDERS)
def test_every_candidate_fits_and_another_rung_does_not(name: str, task: Task) -> None:
    method = rival(name)
    net = task.build(0).to("meta")
    problem = problem_of(task, 4_000)
    few = problem._replace(task=replace(task, train=texts(32, 0)))
    fitting = {json.dumps(c["adapter"]): c for c in method.candidates(problem)}
    assert all(len(method.train(few, settings, 0).data) <= problem.budget for settings in fitting.values())
    for rungs, rung in method.ladders(net):
        sizes = [method.length(net, rung(n), torch.float32) for n in range(1, min(rungs, 12) + 1)]
        assert sizes == sorted(sizes)
        most = sum(size <= problem.budget for size in sizes)
        if 0 < most < len(sizes):
            assert json.dumps(rung(most)) in fitting


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_the_genome_fills_its_budget_and_belongs_to_the_base(dtype: torch.dtype, task: Task) -> None:
    method, problem = every("genome"), problem_of(task, BUDGET, dtype)
    settings = method.candidates(problem)[0]
    trained = method.train(problem, settings, 1)
    assert 0.95 * BUDGET < len(trained.data) <= BUDGET and trained.params == settings["params"]
    other = replace(task, pnet=replace(task.pnet, make=lambda: new_bert(1)))
    with pytest.raises(ValueError, match="the genome's base"):
        method.load(trained.data, other)


def test_the_command_compares_adapters_with_all_weights(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gbfunc.cli.lab.load_task", lambda options: task)
    methods = ["--methods", "bitfit", "linear_probe", "full_fine_tuning"]
    options = ["compare", "--bytes", "300", "8000", "--quick", *methods, "--out", str(tmp_path)]
    assert main(options) == 0
    told = capsys.readouterr()
    results = json.loads((tmp_path / "compare.json").read_text())
    rows = [(row["method"], row["budget"]) for row in results["rows"]]
    every = reference_problem(problem_of(task, 8_000)).budget
    assert rows == [("linear_probe", 300), ("linear_probe", 8_000), ("bitfit", 8_000), ("full_fine_tuning", every)]
    assert [(c["method"], c["budget"]) for c in results["choices"] if c["settings"] is None] == [("bitfit", 300)]
    test = 100 * results["rows"][-1]["test"]
    assert f"full_fine_tuning ({every:,} bytes): {test:.2f}" in told.out and f"{every:,} bytes" not in told.out[:200]
    assert (tmp_path / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert main(options) == 0 and capsys.readouterr().out == told.out
    assert main([*options[:4], "--quick", "--methods", "full_fine_tuning", "--out", str(tmp_path)]) == 0
    assert f"full_fine_tuning ({every:,} bytes): {test:.2f}" in capsys.readouterr().out
