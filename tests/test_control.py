"""PPO through the bottleneck in real environments, its command line, and networks that remember or see."""

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.tasks import Task
from gbfunc.tasks.control import (
    SETTINGS,
    Environment,
    Episodes,
    Rollouts,
    control,
    control_task,
    evaluate,
    find_environment,
    rollout_batches,
)
from gbfunc.tasks.pnets import PNETS, find_pnet
from gbfunc.tasks.pnets.actors import ActorCritic, ConvActorCritic, Normalizer, RecurrentActorCritic
from gbfunc.tasks.ppo import Settings, ppo_loss
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
    task: Task, compression: float | None = 10.0, seed: int = 0, validate: bool = True
) -> tuple[nn.Module, gb.Plan, Fit]:
    """Train a genome, or the p-net itself without compression: the network, its plan and the training."""
    pnet = task.build(seed)
    dense = compression is None
    plan = gb.make_plan(pnet, rules=[(".", None)]) if dense else task.plan(pnet, compression=compression)
    recipe = task.recipe(plan.genome_params)
    result = fit(genome_trainer(plan, pnet, task, recipe, seed), task, recipe, seed, validate=validate)
    return gb.materialize(plan, result.state, pnet), plan, result


def test_environments_and_settings(cartpole: Environment, pendulum: Environment) -> None:
    assert cartpole[:5] == ("CartPole-v1", (4,), 2, True, 475.0)
    assert pendulum[:5] == ("Pendulum-v1", (3,), 1, False, None)
    for env_id in ("CartPole-v99", "Nowhere-v0", ""):
        with pytest.raises(ValueError, match=f"no environment '{env_id}'"):
            find_environment(env_id)
    with pytest.raises(ValueError, match="must have vectors or images as observations"):
        find_environment("FrozenLake-v1")
    assert all(settings.env_steps % (settings.n_envs * settings.horizon) == 0 for settings in SETTINGS.values())
    with pytest.raises(ValueError, match="minibatches must divide a rollout of 256 transitions, got 3"):
        replace(TINY, minibatches=3)
    rollouts = Rollouts(cartpole, TINY)
    assert rollouts.to("cpu") is rollouts
    with pytest.raises(ValueError, match="runs only on the CPU, got --device meta: leave the option out"):
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
    task, compression = control_task(cartpole, TINY), None if dense else 10.0
    first, again, other = (train(task, compression, seed)[-1] for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.history] for run in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert [row["env_steps"] for row in rows[0]] == [256, 512] and first.steps == 4
    one, two = (flat_genome(run.state) for run in (first, again))
    assert all(torch.equal(one[name], two[name]) for name in one) and one.keys() == two.keys()


def test_continuous_actions_train(pendulum: Environment) -> None:
    task = control_task(pendulum, TINY)
    net, _, result = train(task)
    assert net.get_parameter("log_std").any()
    assert task.facts(result.history)["env_steps_to_solve"] is None
    returns = evaluate(net, task.test)
    assert returns.shape == (100,) and -2000 < returns.mean() < -100


def test_a_few_seconds_teach_cartpole(cartpole: Environment) -> None:
    settings = replace(SETTINGS["CartPole-v1"], env_steps=12_288, eval_every=12)
    task = control_task(cartpole, settings)
    net, plan, _ = train(task)
    pnet = task.build(0)
    born = gb.materialize(plan, gb.init_genome(plan, pnet, 0), pnet)
    before, after = (evaluate(network, task.test).mean() for network in (born, net))
    assert plan.ratio_params >= 10 and before < 100 and after > 3 * before and after > 200


def test_train_writes_what_eval_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = ["train", "--task", "control", "--compression", "12", "--env-steps", "2048", "--out", str(out)]
    assert main(command) == 0
    capsys.readouterr()
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["env"], metrics["pnet_config"]["hidden"], metrics["env_steps"]) == ("CartPole-v1", [64, 64], 2_048)
    assert metrics["ratio_params"] == metrics["pnet_params"] / metrics["genome_params"] >= 12
    assert metrics["genome_bytes"] == (out / "genome.safetensors").stat().st_size
    # What is reported is what the file holds, in the same episodes.
    assert main(["eval", "--task", "control", "--genome", str(out / "genome.safetensors")]) == 0
    assert f"{metrics['test_mean_return']:.1f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--task", "control", "--sizes", "3", "8", "2"], "--sizes must start with 4 inputs"),
        (["train", "--task", "control", "--env-steps", "100"], "at least one rollout, 1,024 steps, got 100"),
        (["train", "--pnet", "actor_critic"], "reads observations, the task has images: take mlp"),
        (["train", "--task", "control", "--dense", "--compression", "3"], "--compression cannot be used with --dense"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and told.startswith("gbfunc: error: ")


FAST = Settings(env_steps=4_096, n_envs=16, horizon=8, epochs=4, minibatches=4, lr=3e-2, eval_every=100)


class Recall(gymnasium.Env):
    """A cue at first, two steps of nothing, then one action that must be the cue: 1 for the right one."""

    observation_space, action_space = Box(-1.0, 1.0, (2,), np.float32), Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time, self.cue = 0, int(self.np_random.integers(2))
        return np.array([2 * self.cue - 1, 1], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        reward = float(self.time == 3 and int(action) == self.cue)
        return np.zeros(2, np.float32), reward, self.time == 3, False, {}


class Side(gymnasium.Env):
    """A bright pixel on the left or on the right of an image with its channels last: the action says where."""

    observation_space, action_space = Box(0, 255, (6, 7, 1), np.uint8), Discrete(2)

    def _look(self) -> np.ndarray:
        image = np.zeros((6, 7, 1), np.uint8)
        self.right = int(self.np_random.integers(2))
        image[self.np_random.integers(6), 4 * self.right + self.np_random.integers(3)] = 255
        return image

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward, self.time = float(int(action) == self.right), self.time + 1
        return self._look(), reward, self.time == 4, False, {}


@pytest.fixture(autouse=True)
def environments() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for environment in (Recall, Side):
        gymnasium.register(f"{environment.__name__}-v0", lambda made=environment, **options: made(**options))
    yield
    for environment in (Recall, Side):
        del gymnasium.registry[f"{environment.__name__}-v0"]
    torch.set_num_threads(threads)


def test_a_memory_is_that_of_each_episode_alone() -> None:
    net = RecurrentActorCritic(3, 5, 2, True).double()
    obs = torch.randn(2, 9, 3, dtype=torch.float64)
    memory = torch.randn(2, net.memory, dtype=torch.float64)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, 4] = starts[0, 7] = starts[1, 0] = True
    numbers, values, last = net(obs, starts, memory)
    for b in range(2):
        held = memory[b : b + 1]
        for t in range(9):
            held = torch.zeros_like(held) if starts[b, t] else held
            x = torch.tanh(net.first(obs[b : b + 1, t]))
            held = net.cell(x, held)
            expected = net.heads(held)
            torch.testing.assert_close((numbers[b, t], values[b, t]), (expected[0][0], expected[1][0]))
        torch.testing.assert_close(last[b], held[0])
    blank = net(obs[:, :1], torch.ones(2, 1), memory)
    torch.testing.assert_close(net(obs[:, 0]), (blank[0][:, 0], blank[1][:, 0]))


class Counter(nn.Module):
    """Remembers how many steps it has seen of an episode, and gives that as the value."""

    memory = 1

    def forward(self, obs: Tensor, starts: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = []
        for t in range(obs.shape[1]):
            memory = memory * (1 - starts[:, t, None].float()) + 1
            values.append(memory[:, 0])
        return torch.zeros(*obs.shape[:2], 2), torch.stack(values, 1), memory


def test_rollouts_carry_memories_from_one_to_the_next() -> None:
    """In `Recall` an episode is three steps and a restart: in all environments the value counts 1, 2, 3, 4, 1, ..."""
    settings = replace(FAST, n_envs=4, horizon=6, epochs=1, minibatches=2)
    task = control_task(find_environment("Recall-v0"), settings)
    batches: Any = rollout_batches(task.train, task.recipe(1), torch.Generator().manual_seed(0), Counter)
    seen = [next(batches) for _ in range(6)]
    for rollout in range(3):
        for batch in seen[2 * rollout : 2 * rollout + 2]:
            steps = (torch.arange(6) + 6 * rollout) % 4
            assert torch.equal(batch.values, (steps + 1.0).expand(2, 6)) and batch.obs.shape == (2, 6, 2)
            assert batch.starts is not None and torch.equal(batch.starts, (steps == 0).expand(2, 6))
            assert torch.equal(batch.valid, (steps != 3).float().expand(2, 6))
            # The loss sees the same values again, and probabilities as they were.
            _, terms = ppo_loss(Counter(), batch, settings, True)
            assert float(terms["kl"]) == pytest.approx(0.0, abs=1e-6)
    batches.close()


def test_only_a_memory_solves_what_is_over_when_it_counts() -> None:
    task = control_task(find_environment("Recall-v0"), FAST)
    remembering: Any = task.with_pnet(PNETS["recurrent_actor_critic"](task.interface, hidden=16))
    net, plan, _ = train(remembering, 2.0, validate=False)
    assert plan.ratio_params >= 2 and "cell.weight_hh" in {t.name for t in plan.generated}
    assert evaluate(net, task.test).mean() > 0.95
    task = control_task(task.train.env, replace(FAST, env_steps=1_024))
    assert evaluate(train(task, 2.0, validate=False)[0], task.test).mean() < 0.7


def test_a_genome_that_sees() -> None:
    env = find_environment("Side-v0")
    assert env.inputs == (1, 6, 7) and env.channels_last
    task = control_task(env, replace(FAST, lr=2e-2))
    net, plan, _ = train(
        task.with_pnet(PNETS["conv_actor_critic"](task.interface, width=4, hidden=32)), 4.0, validate=False
    )
    assert isinstance(net, ConvActorCritic) and plan.ratio_params >= 4
    returns = evaluate(net, task.test)
    assert returns.shape == (10,) and returns.mean() > 3.5


def test_statistics_are_those_of_all_observations_seen() -> None:
    layer, x = Normalizer(3).double(), 5 + 2 * torch.randn(60, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x[:7]), x[:7].clamp(-10, 10))
    for part in x[7:].split((13, 40)):
        layer(part)
    torch.testing.assert_close((layer.mean, layer.variance), (x.mean(0), x.var(0, correction=0)))
    assert int(layer.count) == 60
    near = layer.eval()(x)
    torch.testing.assert_close(near.mean(0), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(near.std(0, correction=0), torch.ones(3, dtype=torch.float64))
    assert int(layer.count) == 60 and float(layer(1e9 + x).min()) == 10


def test_a_genome_keeps_statistics_of_observations() -> None:
    task = control_task(find_environment("Recall-v0"), replace(FAST, env_steps=256))
    net, plan, result = train(task, 2.0, validate=False)
    assert {buffer.name for buffer in plan.buffers} == {f"normalizer.{x}" for x in ("mean", "variance", "count")}
    # Two rollouts of 128 steps, each used four times.
    assert net.get_buffer("normalizer.count") == result.state.buffers["normalizer.count"] == 2 * 4 * 128
    assert 0.05 < net.get_buffer("normalizer.mean")[1] < 0.5


def test_stopped_it_goes_on_between_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A pass is 4 rollouts of 512 steps in `Recall`, 64 steps of training."""
    command = ["train", "--task", "control", "--env", "Recall-v0", "--env-steps", "4096", "--compression", "9", "--out"]
    straight, out = tmp_path / "straight", tmp_path / "out"
    assert main([*command, str(straight)]) == 0
    keeping, save = [*command, str(out), "--checkpoint-every", "64", "--resume", "auto"], gb.Checkpointer.save

    def saving(self: gb.Checkpointer, state: Any, extra: Any = None) -> None:
        save(self, state, extra)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(gb.Checkpointer, "save", saving)
        assert main(keeping) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 64" in capsys.readouterr().err
    assert main([*command, str(out), "--checkpoint-every", "16", "--resume", "auto"]) == 2
    assert "must be a multiple of 64, the steps of an epoch" in capsys.readouterr().err
    assert main(keeping) == 0
    for name in ("genome.safetensors", "best.safetensors"):
        assert (out / name).read_bytes() == (straight / name).read_bytes()
    found = [[row.split(",")[:-1] for row in (x / "history.csv").read_text().split()] for x in (straight, out)]
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize(("name", "package"), [("HalfCheetah-v5", "mujoco"), ("MinAtar/Seaquest-v1", "minatar")])
def test_robots_and_small_games(name: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not importlib.util.find_spec(package):
        assert main(["train", "--task", "control", "--env", name]) == 2
        told = capsys.readouterr().err
        assert "pip install" in told and f"[{package}]" in told and told.count("\n") == 1
        return
    env = find_environment(name)
    assert (env.episodes, env.channels_last) == (10, package == "minatar")
    assert train(control_task(env, replace(FAST, env_steps=128)), 5.0, validate=False)[2].steps == 16


def test_images_are_channels_first_and_of_any_type() -> None:
    env, images = find_environment("Side-v0"), np.random.default_rng(0).integers(0, 256, (2, 6, 7, 1)).astype(np.uint8)
    seen = env.seen(images)
    assert seen.dtype == torch.uint8 and torch.equal(seen, torch.tensor(images).permute(0, 3, 1, 2))
    images[:] = 0
    assert seen.any()
    net = ConvActorCritic((4, 84, 84), 2, 8, 3, False)
    bright = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(net(bright), net(bright / 255))


def test_what_is_not_observed_is_not_seen() -> None:
    env = find_environment("CartPole-v1", [0, 2])
    assert env.inputs == (2,)
    assert torch.equal(env.seen(np.arange(8.0).reshape(2, 4)), torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
    net = control("CartPole-v1", observed=[0, 2]).build(0)
    assert 0 < evaluate(net, Episodes(env, 0, 3)).mean() <= 500
    wrong: Any
    for wrong in ([], [4], [-1], ["0"]):
        with pytest.raises(ValueError, match="observed must be a list of indices"):
            find_environment("CartPole-v1", wrong)


def test_what_does_not_fit_is_told() -> None:
    vectors, images = (control_task(find_environment(name), FAST).interface for name in ("Recall-v0", "Side-v0"))
    for name, interface, config, message in (
        ("recurrent_actor_critic", images, {}, "reads vectors .for images: conv_actor_critic."),
        ("actor_critic", images, {}, "reads vectors .for images: conv_actor_critic."),
        ("conv_actor_critic", vectors, {}, "reads images of 5 x 5 or more, the task has inputs of 2"),
        ("conv_actor_critic", images, {"width": 1.5}, "width of conv_actor_critic must be an int >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            find_pnet(name, interface, config)
    task = control_task(find_environment("Recall-v0"), FAST)
    recipe = replace(task.recipe(1), batch_size=20)
    with pytest.raises(ValueError, match="needs whole sequences of 8 steps in each minibatch, got minibatches of 20"):
        next(rollout_batches(task.train, recipe, torch.Generator(), Counter))


def test_atari() -> None:
    pytest.importorskip("ale_py", reason="Atari's games need ale-py")
    env = find_environment("ALE/Breakout-v5")
    assert env[:4] == ("ALE/Breakout-v5", (4, 84, 84), 4, True) and env.episodes == 10
    task = control_task(env, replace(FAST, env_steps=16, n_envs=2, minibatches=2, epochs=1))
    small = task.with_pnet(PNETS["conv_actor_critic"](task.interface, width=4, hidden=16))
    _, plan, result = train(small, 5.0, validate=False)
    assert result.steps == 2 and plan.ratio_params >= 5
    full = task.plan(task.build(0), compression=100.0)
    assert full.pnet_params == 1_686_693 and full.ratio_params >= 100
    assert control("ALE/Breakout-v5").recipe(1).lr == 2.5e-3
