"""PPO through the bottleneck in real environments, and its command line."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.tasks import Task
from gbfunc.tasks.control import (
    SETTINGS,
    Environment,
    Episodes,
    Rollouts,
    control_task,
    evaluate,
    find_environment,
)
from gbfunc.tasks.pnets.actors import ActorCritic
from gbfunc.tasks.ppo import Settings
from gbfunc.tasks.training import Fit, fit, genome_trainer
from gbfunc.trees import flat_genome

TINY = replace(SETTINGS["CartPole-v1"], env_steps=512, n_envs=4, horizon=64, epochs=1, minibatches=2, eval_every=1)


@pytest.fixture(scope="module")
def cartpole() -> Environment:
    return find_environment("CartPole-v1")


@pytest.fixture(scope="module")
def pendulum() -> Environment:
    return find_environment("Pendulum-v1")


def train(
    env: Environment, seed: int, settings: Settings = TINY, dense: bool = False
) -> tuple[Task, torch.nn.Module, gb.Plan, Fit]:
    task = control_task(env, settings)
    pnet = task.build(seed)
    plan = gb.make_plan(pnet, rules=[(".", None)]) if dense else task.plan(pnet, compression=10.0)
    recipe = task.recipe(plan.genome_params)
    return task, pnet, plan, fit(genome_trainer(plan, pnet, task, recipe, seed), task, recipe, seed)


def test_environments_and_settings(cartpole: Environment, pendulum: Environment) -> None:
    assert cartpole[:5] == ("CartPole-v1", (4,), 2, True, 475.0)
    assert pendulum[:5] == ("Pendulum-v1", (3,), 1, False, None)
    for env_id in ("CartPole-v99", "Nowhere-v0", ""):
        with pytest.raises(ValueError, match=f"no environment '{env_id}'"):
            find_environment(env_id)
    with pytest.raises(ValueError, match="must have vectors or images as observations"):
        find_environment("FrozenLake-v1")
    assert all(settings.env_steps % (settings.n_envs * settings.horizon) == 0 for settings in SETTINGS.values())
    with pytest.raises(ValueError, match="3 minibatches do not divide a rollout of 256"):
        replace(TINY, minibatches=3)
    rollouts = Rollouts(cartpole, TINY)
    assert rollouts.to("cpu") is rollouts
    with pytest.raises(ValueError, match="runs on the CPU, where its environments are; got --device meta"):
        rollouts.to("meta")


def test_networks_start_orthogonal_with_their_gains() -> None:
    torch.manual_seed(3)
    net = ActorCritic((4, 32, 48, 2))
    for half, gains in ((net.actor, (2**0.5, 2**0.5, 0.01)), (net.critic, (2**0.5, 2**0.5, 1.0))):
        for layer, gain in zip(list(half)[::2], gains, strict=True):
            assert isinstance(layer, torch.nn.Linear)
            weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5, rtol=0)
            assert not layer.bias.any()
    numbers, values = ActorCritic((3, 64, 64, 1), vectors=True)(torch.randn(7, 3))
    assert numbers.shape == (7, 2) and values.shape == (7,) and not numbers[:, 1].any()
    assert sum(p.numel() for p in ActorCritic((4, 64, 64, 2)).parameters()) == 9_155


def test_evaluation_is_a_loop_over_single_environments(pendulum: Environment) -> None:
    net = ActorCritic((3, 64, 64, 1), vectors=True)
    with torch.no_grad():
        net.get_parameter("actor.4.weight").mul_(100)
    expected = []
    for seed in (5, 6, 7):
        env = gymnasium.make(pendulum.id)
        obs, total, over = env.reset(seed=seed)[0], 0.0, False
        while not over:
            with torch.no_grad():
                action = net.actor(torch.as_tensor(obs)).clamp(-2, 2).numpy()
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        expected.append(total)
    np.testing.assert_allclose(evaluate(net, Episodes(pendulum, 5, 3)), expected, rtol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_a_seed_decides_everything(cartpole: Environment, dense: bool) -> None:
    before = torch.get_rng_state()
    (*_, first), (*_, again), (*_, other) = (train(cartpole, seed, dense=dense) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.history] for run in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert [row["env_steps"] for row in rows[0]] == [256, 512] and first.steps == 4
    one, two = (flat_genome(run.state) for run in (first, again))
    assert all(torch.equal(one[name], two[name]) for name in one) and one.keys() == two.keys()


def test_continuous_actions_train(pendulum: Environment) -> None:
    task, pnet, plan, result = train(pendulum, 0)
    net = gb.materialize(plan, result.state, pnet)
    assert not torch.equal(net.get_parameter("log_std"), pnet.get_parameter("log_std"))
    assert task.facts(result.history)["env_steps_to_solve"] is None
    returns = evaluate(net, task.test)
    assert returns.shape == (100,) and -2000 < returns.mean() < -100


def test_a_few_seconds_teach_cartpole(cartpole: Environment) -> None:
    settings = replace(SETTINGS["CartPole-v1"], env_steps=12_288, eval_every=12)
    task, pnet, plan, result = train(cartpole, 0, settings)
    nets = (gb.materialize(plan, genome, pnet) for genome in (gb.init_genome(plan, pnet, 0), result.state))
    before, after = (evaluate(net, task.test).mean() for net in nets)
    assert plan.ratio_params >= 10 and before < 100 and after > 3 * before and after > 200


# Command line


def test_train_writes_what_eval_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = ["train", "--task", "control", "--compression", "12", "--env-steps", "2048", "--out", str(out)]
    assert main(command) == 0
    told = capsys.readouterr()
    assert told.err.startswith("genome: step 32/32, loss ") and "validation mean return" in told.err
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["env"], metrics["pnet_config"]["hidden"], metrics["env_steps"]) == ("CartPole-v1", [64, 64], 2_048)
    assert metrics["ratio_params"] == metrics["pnet_params"] / metrics["genome_params"] >= 12
    assert metrics["genome_bytes"] == (out / "genome.safetensors").stat().st_size
    with (out / "history.csv").open(newline="") as file:
        assert [(row["run"], row["env_steps"]) for row in csv.DictReader(file)] == [("genome", "2048")]
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    # What is reported is what the file holds, in the same episodes.
    assert main(["eval", "--task", "control", "--genome", str(out / "genome.safetensors")]) == 0
    assert f"{metrics['test_mean_return']:.1f}" in capsys.readouterr().out


def test_dense_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--task", "control", "--dense", "--sizes", "4", "8", "2", "--env-steps", "1024"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["network"] == "dense" and metrics["pnet_config"]["hidden"] == [8]
    assert metrics["genome_params"] == metrics["pnet_params"] == 5 * 8 + 9 * 2 + 5 * 8 + 9
    capsys.readouterr()
    assert main(["plan", "--task", "control", "--compression", "20"]) == 0
    assert "critic.2.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--task", "control", "--env", "Nowhere-v0"], "no environment 'Nowhere-v0'"),
        (["train", "--task", "control", "--sizes", "3", "8", "2"], "sizes must start with 4 inputs"),
        (["train", "--task", "control", "--env-steps", "100"], "at least one rollout, 1,024 steps, got 100"),
        (["train", "--task", "control", "--pnet", "mlp"], "reads images, the task has observations: take actor_critic"),
        (["train", "--pnet", "actor_critic"], "reads observations, the task has images: take mlp"),
        (["train", "--task", "control", "--dense", "--compression", "3"], "--compression cannot be used with --dense"),
        (["train", "--task", "control", "--resume", "auto"], "are for tasks with examples, got --task control"),
        (["train", "--task", "control", "--device", "meta"], "--device 'meta' cannot be used"),
        (["train", "--env-steps", "9"], "the task digits has no option env_steps"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and told.startswith("gbfunc: error: ")


def test_demo_compares_dense_actors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--task", "control", "--task-config", '{"env_steps": 1024}', "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["small_dense_params"] >= metrics["genome_params"]
    assert f"{metrics['dense_test_mean_return']:.1f}" in capsys.readouterr().out


def test_without_gymnasium_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert main(["train", "--task", "control"]) == 2
    assert "pip install 'gbfunc[control]'" in capsys.readouterr().err
