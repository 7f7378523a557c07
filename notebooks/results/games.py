"""Train a dueling DQN on small games with generated weights, and compare it with a dense net.

Run `python notebooks/results/games.py --out games` (`pip install 'gbfunc[cli,minatar]'`).

The algorithm is DQN (Mnih et al., 2015) with double targets (van Hasselt et al., 2016) and dueling heads (Wang et al.,
2016). The weights are generated once per step of all environments. A network generated from an earlier genome computes
the targets. The p-net is `conv_actor_critic`: its policy head returns the advantages, its value head the values. The
learning rate falls linearly to a hundredth.

In PPO, the initial weights of the policy head are 100 times smaller than the weights of other layers. In a dueling
network, a genome would need thousands of updates to reach the scale of the advantages. Therefore the script starts both
heads at the same scale.

Options: `--games`, `--frames` (steps of all environments together), `--compressions` (0 trains the dense net), `--lr`
and `--dense-lr` (initial learning rates), `--width` and `--hidden` (of the p-net), `--envs`, `--update-every` (frames),
`--replay` (transitions), `--segment` (frames), `--episodes` (per evaluation), `--seeds`, `--out`. A training is divided
into segments. Each segment begins with new environments and ends with an evaluation. Evaluations with seeds of 100 or
more use other episodes: choose options with these seeds. After an interruption, run the command again: the training
continues from its last segment, with bit-identical results. Writes `games.json` and `games.png`, and prints a table.

Atari's BeamRider, as in Shuvaev et al. (2024), needs `gbfunc[atari]` and an hour of one core for each network:

    python notebooks/results/games.py --games ALE/BeamRider-v5 --frames 240000 --width 32 --hidden 1024 --envs 8 \\
        --segment 25000 --episodes 3 --replay 20000 --compressions 0 492 --seeds 0 --out beamrider
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.plots import LINES, PALETTE
from gbfunc.tasks.control import ATARI, Environment, find_environment, make_envs, stream
from gbfunc.tasks.pnets import PNETS, Interface

GAMMA, BATCH, UPDATES_PER_TARGET = 0.99, 32, 250
"""Discount factor; transitions per update; updates after which the target network is replaced."""

EXPLORING, LEAST = 0.1, 0.05
"""Part of the frames during which the probability of random actions falls from 1, and the probability afterwards."""

LONGEST = 5_000
"""Largest number of steps of an episode of an evaluation."""

FIRST = 5_000
"""Frames before the first update."""


def q_values(net: Any, obs: Tensor) -> Tensor:
    """Return the Q-values of all actions [B, A]: the value of each state plus the advantages minus their mean."""
    advantages_BA, values_B = net(obs)
    return values_B[:, None] + advantages_BA - advantages_BA.mean(1, keepdim=True)


def loss_fn(net: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return Huber's loss between the Q-values of the actions taken and the targets."""
    obs, actions_B, targets_B = batch
    return F.smooth_l1_loss(q_values(net, obs).gather(1, actions_B[:, None])[:, 0], targets_B)


class Replay:
    """A ring buffer of the last T steps of N environments. Each observation is stored once.

    The next observation of a step is the observation in the next row. A step that only resets an environment is no
    transition and is never drawn.
    """

    def __init__(self, rows: int, n: int, env: Environment) -> None:
        self.rows, self.n, self.count = rows, n, 0
        self.obs = np.zeros((rows, n, *env.inputs), np.uint8)
        self.actions = np.zeros((rows, n), np.int64)
        self.rewards = np.zeros((rows, n), np.float32)
        self.over, self.valid = np.zeros((rows, n), bool), np.zeros((rows, n), bool)

    def add(self, obs: Tensor, actions: Tensor, rewards: Any, over: Any, valid: Any) -> None:
        """Add one step of all environments."""
        row, self.count = self.count % self.rows, self.count + 1
        self.obs[row], self.actions[row], self.rewards[row] = obs.numpy(), actions.numpy(), rewards
        self.over[row], self.valid[row] = over, valid

    def sample(self, draws: np.random.Generator, number: int) -> tuple[Tensor, ...]:
        """Draw transitions: observations, actions, rewards, whether the episode terminated, and next observations."""
        first, found = max(0, self.count - self.rows), np.zeros((2, 0), int)
        while found.shape[1] < number:
            # The next observation of the newest row is not stored yet.
            drawn = draws.integers([[first], [0]], [[self.count - 1], [self.n]], (2, number))
            drawn[0] %= self.rows
            found = np.concatenate([found, drawn[:, self.valid[drawn[0], drawn[1]]]], 1)
        rows, columns = found[:, :number]
        at, after = (rows, columns), ((rows + 1) % self.rows, columns)
        return tuple(
            map(torch.from_numpy, (self.obs[at], self.actions[at], self.rewards[at], self.over[at], self.obs[after]))
        )

    def cut(self) -> None:
        """Exclude the newest step from sampling, because the next row will belong to new environments."""
        self.valid[(self.count - 1) % self.rows] = False

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays that a file of the buffer must have."""
        names = ("obs", "actions", "rewards", "over", "valid")
        return {"count": np.array(self.count)} | {name: getattr(self, name) for name in names}

    def restore(self, path: Path) -> None:
        """Restore the buffer from a file of `arrays`."""
        for name, array in load_file(path).items():
            setattr(self, name, int(array) if name == "count" else array)


def seen(env: Environment, obs: Tensor) -> Tensor:
    """Return observations in the type that the network reads: bytes for Atari's images, floats for MinAtar."""
    return obs if env.id.startswith(ATARI) else obs.float()


@torch.no_grad()
def evaluate(net: nn.Module, env: Environment, number: int, seed: int) -> list[float]:
    """Play one episode in each of `number` environments with 1 % random actions. Return the undiscounted returns."""
    envs, draws = make_envs(env.id, number), torch.Generator().manual_seed(seed)
    returns, running = np.zeros(number), np.ones(number, bool)
    obs = env.reset(envs, seed)
    for _ in range(LONGEST):
        actions = acting(net, env, obs, 0.01, draws)
        array, rewards, terminated, truncated, _ = envs.step(actions.numpy())
        obs, returns = env.seen(array), returns + rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    envs.close()
    return returns.tolist()


@torch.no_grad()
def acting(net: nn.Module, env: Environment, obs: Tensor, rate: float, draws: torch.Generator) -> Tensor:
    """Choose the actions [N] with the largest Q-values, or random actions with probability `rate`."""
    best_N = q_values(net, seen(env, obs)).argmax(1)
    any_N = torch.randint(env.n_actions, best_N.shape, generator=draws)
    return torch.where(torch.rand(best_N.shape, generator=draws) < rate, any_N, best_N)


def build(options: argparse.Namespace, env: Environment, compression: float, seed: int) -> tuple[nn.Module, gb.Plan]:
    """Make the p-net and the plan of its genome, or of the dense net if `compression` is 0."""
    interface = Interface(env.inputs, env.n_actions, actions="choice")
    described = PNETS["conv_actor_critic"](interface, width=options.width, hidden=options.hidden)
    pnet = described.build(seed)
    head = pnet.get_parameter("heads.actor.0.weight")
    nn.init.orthogonal_(head, generator=torch.Generator().manual_seed(stream(seed, 8)))
    if not compression:
        return pnet, gb.make_plan(pnet, rules=[(".", None)])
    size = sum(p.numel() for p in pnet.parameters()) / compression
    return pnet, gb.make_plan(pnet, **described.plan(size)._asdict(), compression=compression)


def falling(step: int, highest: float, updates: int) -> float:
    """Return the learning rate of an update, which falls linearly from `highest` to a hundredth of `highest`."""
    return highest * max(0.01, 1 - step / updates)


def learn(options: argparse.Namespace, game: str, compression: float, seed: int) -> dict[str, Any]:
    """Train one network, or continue its training. Return its size and the rows of `frames` and `returns`."""
    out = options.out / f"{game.replace('/', '-')}, {compression:g}x, {seed}"
    out.mkdir(parents=True, exist_ok=True)
    if (out / "result.json").exists():
        return json.loads((out / "result.json").read_text())
    env, n = find_environment(game), options.envs
    pnet, plan = build(options, env, compression, seed)
    highest = options.lr if compression else options.dense_lr
    updates = max(1, (options.frames - FIRST) // options.update_every)
    adam = gb.torch_optimizer(torch.optim.Adam, lr=partial(falling, highest=highest, updates=updates), eps=1e-5)
    train_step = gb.make_train_step(plan, pnet, loss_fn, adam, donate=True, clip_norm=10.0)
    loaded = gb.load_checkpoint(out, train_step, train_step.init(seed=seed))
    state, replay = loaded.state, Replay(options.replay // n, n, env)
    rows = loaded.extra["rows"] if loaded.path else []
    done = loaded.extra["segments"] if loaded.path else 0
    if loaded.path:
        replay.restore(out / f"replay-{done}.safetensors")
    per_segment, segments = options.segment // n, -(-options.frames // options.segment)
    with gb.Checkpointer(out, train_step, keep=1) as checkpointer:
        for segment in range(done, segments):
            begun, draws = time.perf_counter(), np.random.default_rng(stream(seed, segment, 0))
            generator = torch.Generator().manual_seed(stream(seed, segment, 1))
            envs, updates, losses = make_envs(game, n), 0, []
            obs, restarts = env.reset(envs, stream(seed, segment, 2)), np.zeros(n, bool)
            net, target = (gb.materialize(plan, state, pnet).eval() for _ in range(2))
            for step in range(per_segment):
                frames = segment * options.segment + step * n
                net.load_state_dict(gb.generate(plan, state))
                rate = max(LEAST, 1 - (1 - LEAST) * frames / (EXPLORING * options.frames))
                actions = acting(net, env, obs, rate, generator)
                array, rewards, terminated, truncated, _ = envs.step(actions.numpy())
                rewards = np.sign(rewards) if game.startswith(ATARI) else rewards
                replay.add(obs, actions, rewards, terminated, ~restarts)
                obs, restarts = env.seen(array), terminated | truncated
                if frames < FIRST:
                    continue
                rounds = n // options.update_every
                before, taken, rewards, over, after = replay.sample(draws, rounds * BATCH)
                before, after = seen(env, before), seen(env, after)
                with torch.no_grad():
                    best_1 = q_values(net, after).argmax(1, keepdim=True)
                    goals = rewards + GAMMA * q_values(target, after).gather(1, best_1)[:, 0] * ~over
                for batch in zip(*(x.split(BATCH) for x in (before, taken, goals)), strict=True):
                    state, info = train_step(state, batch)
                    updates += 1
                    losses.append(info.loss)
                    if updates % UPDATES_PER_TARGET == 0:
                        target.load_state_dict(gb.generate(plan, state))
            envs.close()
            replay.cut()
            # Each evaluation has its own episodes. Seeds for choices never use the episodes of reported results.
            episodes = stream(100 if seed >= 100 else 0, segment, 7)
            returns = evaluate(gb.materialize(plan, state, pnet).eval(), env, options.episodes, episodes)
            seconds = time.perf_counter() - begun
            rows.append({"frames": (segment + 1) * options.segment, "returns": returns, "seconds": seconds})
            loss = float(torch.stack(losses).mean()) if losses else float("nan")
            told = f"{game} {compression:g}x seed {seed}: {rows[-1]['frames']:,} frames"
            print(f"{told}, return {statistics.fmean(returns):.2f}, loss {loss:.4f}, {seconds:.0f} s", flush=True)
            # Save the replay before the checkpoint, because a checkpoint without its replay could not be resumed.
            save_file(replay.arrays(), out / f"replay-{segment + 1}.safetensors")
            checkpointer.save(state, {"rows": rows, "segments": segment + 1})
            checkpointer.wait()
            (out / f"replay-{segment}.safetensors").unlink(missing_ok=True)
    gb.save(out / "genome.safetensors", plan, state)
    result = {"params": plan.genome_params, "ratio": plan.ratio_params, "pnet": plan.pnet_params, "rows": rows}
    (out / "result.json").write_text(json.dumps(result))
    (out / f"replay-{segments}.safetensors").unlink(missing_ok=True)
    return result


def curves(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Figure:
    """Draw returns against frames with one plot per game: the mean and the range over seeds."""
    figure = Figure(figsize=(0.6 + 3.6 * len(runs), 3.4), layout="constrained")
    (row,) = figure.subplots(1, len(runs), squeeze=False)
    for axes, (game, sizes) in zip(row, runs.items(), strict=True):
        for (name, seeds), color, line in zip(sizes.items(), PALETTE, LINES * 2, strict=False):
            frames = [point["frames"] / 1e3 for point in seeds[0]["rows"]]
            values = [[statistics.fmean(point["returns"]) for point in seed["rows"]] for seed in seeds]
            columns = list(zip(*values, strict=True))
            axes.plot(frames, [statistics.fmean(x) for x in columns], label=name, color=color, linestyle=line)
            axes.fill_between(frames, [min(x) for x in columns], [max(x) for x in columns], color=color, alpha=0.15)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(title=game, xlabel="frames (thousands)", ylabel="mean return")
        axes.legend(frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Train all networks, print the table, draw the figure."""
    parser = argparse.ArgumentParser()
    games = ["MinAtar/SpaceInvaders-v1", "MinAtar/Breakout-v1", "MinAtar/Seaquest-v1"]
    parser.add_argument("--games", nargs="+", default=games)
    parser.add_argument("--compressions", type=float, nargs="+", default=[0.0, 500.0])
    defaults = {
        "frames": 51_200,
        "width": 16,
        "hidden": 384,
        "envs": 32,
        "update-every": 4,
        "replay": 100_000,
        "segment": 12_800,
        "episodes": 50,
    }
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--dense-lr", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("games"))
    options = parser.parse_args(argv)
    if options.envs % options.update_every or min(options.replay, options.segment) < 2 * options.envs:
        parser.error("--envs must be a multiple of --update-every, --replay and --segment at least twice --envs")
    try:
        for game in options.games:
            find_environment(game)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    runs: dict[str, dict[str, Any]] = {}
    lines = []
    for game in options.games:
        for compression in options.compressions:
            seeds = [learn(options, game, compression, seed) for seed in options.seeds]
            size = (
                f"{seeds[0]['params']:,} ({seeds[0]['ratio']:,.0f}x)" if compression else f"{seeds[0]['pnet']:,}, dense"
            )
            runs.setdefault(game, {})[size] = seeds
            # Average the last fifth of the evaluations, because one evaluation is noisy.
            last = [seed["rows"][-max(1, len(seed["rows"]) // 5) :] for seed in seeds]
            scores = [[x for row in rows for x in row["returns"]] for rows in last]
            means = [statistics.fmean(seed) for seed in scores]
            # The standard error over the episodes of one seed, averaged over the seeds.
            error = statistics.fmean(statistics.stdev(seed) / len(seed) ** 0.5 for seed in scores)
            deviation = f" ± {statistics.stdev(means):.2f}" if len(means) > 1 else ""
            seconds = statistics.fmean(sum(row["seconds"] for row in seed["rows"]) for seed in seeds)
            cells = [game, size, f"{statistics.fmean(means):.2f}{deviation}", f"{error:.2f}", f"{seconds / 60:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    head = "| game | parameters | return | standard error over episodes | minutes each |"
    print("\n".join([head, "|---|---|---|---|---|", *lines]))
    (options.out / "games.json").write_text(json.dumps(runs))
    curves(runs).savefig(options.out / "games.png", dpi=150)


if __name__ == "__main__":
    main()
