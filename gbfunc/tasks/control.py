"""The task `control`: trains policy and value networks in environments of gymnasium by PPO.

A pass over the data consists of several rollouts: the current network takes T steps in N environments. PPO uses each
transition in several training steps. The validation and test splits are fixed episodes, played by the greedy policy.

Suffixes: T steps of a rollout, N environments, B transitions (or sequences), O numbers of an observation (or channels,
rows and columns of an image), P parameters of the distribution of actions, M numbers of a network's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.extras import import_extra
from gbfunc.tasks.base import History, Metric, Recipe, Task
from gbfunc.tasks.pnets import PNETS, Interface
from gbfunc.tasks.pnets.base import seeded
from gbfunc.tasks.ppo import PolicyValue, Settings, Transitions, gae, policy, ppo_loss

ATARI = "ALE/"
"""Prefix of the names of Atari's games."""

_Front = tuple[Tensor, NDArray[np.bool_], NDArray[np.bool_], Tensor | None]
"""State before a rollout: observations [N, O], whether the next step only restarts the environment [N], whether an
observation is the first of an episode [N], and the memory [N, M] of the network (None for a network without memory)."""

# From one seed, `stream` derives a seed per purpose, so that evaluations never repeat an episode of training.
_RESETS, _ORDER, _ACTIONS, _CHECKS, _FINAL = range(5)


class Environment(NamedTuple):
    """The properties of an environment that networks and training need."""

    id: str  # the name in gymnasium's registry
    inputs: tuple[int, ...]  # shape of the network's inputs: (numbers,), or (channels, rows, columns)
    n_actions: int  # number of actions to choose from, or length of an action vector
    discrete: bool  # whether an action is an index (below `n_actions`), not a vector
    threshold: float | None  # mean return at which gymnasium considers the environment solved, or None
    observed: tuple[int, ...] | None = None  # indices of the observed numbers that the network gets; None means all
    channels_last: bool = False  # whether the environment's images have their channels last
    limit: int | None = None  # largest number of steps of an episode, or None

    @property
    def episodes(self) -> int:
        """Number of episodes in an evaluation: 10 if observations are images or `limit` is 1,000 or more, else 100."""
        return 100 if len(self.inputs) == 1 and (self.limit or 0) < 1_000 else 10

    def seen(self, obs: NDArray[Any]) -> Tensor:
        """Convert observations [..., O] to inputs: the numbers `observed` in float32, or images, channels first."""
        # Copy, because an environment may write the next observation into the same memory.
        x = torch.from_numpy(np.array(obs if self.observed is None else obs[..., self.observed]))
        x = x.movedim(-1, -3) if self.channels_last else x
        return x if x.dtype == torch.uint8 else x.to(torch.float32)

    def reset(self, envs: Any, seed: int) -> Tensor:
        """Start environments from a seed, and return the first observations."""
        # ALE accepts seeds below 2**31 and adds the environment's index, so keep the seed below 2**30.
        return self.seen(envs.reset(seed=seed % 2**30 if self.id.startswith(ATARI) else seed)[0])


def find_environment(env_id: str, observed: Sequence[int] | None = None) -> Environment:
    """Describe an environment. ValueError unless observations are vectors or images, and actions vectors or indices."""
    envs = make_envs(env_id, 1)
    from gymnasium.spaces import Box, Discrete

    seen, done = envs.single_observation_space, envs.single_action_space
    threshold, limit = (getattr(envs.spec, name, None) for name in ("reward_threshold", "max_episode_steps"))
    envs.close()
    shape = tuple[int, ...](seen.shape if isinstance(seen, Box) else ())
    n_actions, discrete = None, isinstance(done, Discrete)
    if isinstance(done, Discrete) and int(done.start) == 0:
        n_actions = int(done.n)
    elif isinstance(done, Box) and len(done.shape) == 1:
        n_actions = done.shape[0]
    if n_actions is None or len(shape) not in (1, 3):
        expected = "vectors or images as observations, and vectors or choices numbered from 0 as actions"
        raise ValueError(f"environment {env_id!r} must have {expected}, got {seen} and {done}")
    last = len(shape) == 3 and (shape[-1] < shape[0] or env_id.startswith("MinAtar/"))
    if observed is not None:
        if len(shape) != 1 or not observed or not all(type(i) is int and 0 <= i < shape[0] for i in observed):
            expected = "observed must be a list of indices of a vector observation"
            raise ValueError(f"{expected}, got {observed!r} and observations of shape {shape}")
        shape, observed = (len(observed),), tuple(observed)
    inputs = (shape[-1], *shape[:-1]) if last else shape
    return Environment(env_id, inputs, n_actions, discrete, threshold, observed, last, limit)


def make_envs(env_id: str, n: int) -> Any:
    """Make `n` environments as one `gymnasium.vector.VectorEnv`.

    The step after an episode's last step ignores the action and restarts the environment. Atari games (`ALE/...`) come
    from ale-py, which contains the ROMs. In Atari games, an observation has four grey frames of 84 x 84 pixels, rewards
    are not clipped, and an episode lasts at most five minutes (Mnih et al., 2015).
    """
    gymnasium = import_extra("gymnasium", "the control task", "gbfunc[control]")
    options: dict[str, Any] = {}
    if env_id.startswith(ATARI):
        gymnasium.register_envs(import_extra("ale_py", "a game of Atari's", "gbfunc[atari]"))
        options = {"reward_clipping": False, "max_num_frames_per_episode": 5 * 60 * 60}
    if env_id.startswith("MinAtar/") and env_id not in gymnasium.registry:
        import_extra("minatar.gym", "a game of MinAtar", "gbfunc[minatar]").register_envs()
    try:
        envs = gymnasium.make_vec(env_id, num_envs=n, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        cure = "pip install 'gbfunc[mujoco]'" if "mujoco" in str(error).lower() else error
        raise ImportError(f"environment {env_id!r} needs more packages: {cure}") from error
    except gymnasium.error.Error as error:
        raise ValueError(f"no environment {env_id!r}: {error}") from error
    mode = envs.metadata.get("autoreset_mode")
    if mode != gymnasium.vector.AutoresetMode.NEXT_STEP:
        raise ValueError(f"environment {env_id!r} must restart in the next step (NEXT_STEP), got the mode {mode}")
    return envs


def step_envs(envs: Any, actions: Tensor) -> tuple[NDArray[Any], ...]:
    """Take a step, with vector actions clipped to their bounds. Return observations, rewards, terminated, truncated."""
    array = actions.numpy()
    if actions.is_floating_point():
        array = np.clip(array, envs.action_space.low, envs.action_space.high)
    return envs.step(array)[:4]


_CARTPOLE = Settings(env_steps=51_200, n_envs=8, reward_scale=0.02, lr=1e-2, dense_lr=1e-2)
_PENDULUM = Settings(98_304, 8, 256, 10, 8, gamma=0.9, entropy=0.0, reward_scale=0.05, lr=1e-2, dense_lr=3e-3)
_WALKERS = Settings(999_424, 8, 256, 10, 8, entropy=0.0, reward_scale=0.05, lr=3e-3, dense_lr=1e-3, eval_every=16)

SETTINGS: Mapping[str, Settings] = MappingProxyType(
    dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"), _WALKERS)
    | {"CartPole-v1": _CARTPOLE, "Pendulum-v1": _PENDULUM}
)
"""{environment: settings}, chosen with the seeds 100 to 102. No reported result uses these seeds."""

# CleanRL's settings (`ppo_atari.py`), but the genome's learning rate is ten times CleanRL's (tested in short runs).
_ATARI_SETTINGS = Settings(env_steps=10_000_000, n_envs=8, clip=0.1, reward_signs=True, eval_every=50)


@dataclass(frozen=True)
class Rollouts:
    """The training split: `per_pass` rollouts. `len` counts each transition `epochs` times, as PPO trains on it."""

    env: Environment
    settings: Settings

    @property
    def per_pass(self) -> int:
        """Number of rollouts in a pass: at least `eval_every`, and enough to finish the longest episode in one pass."""
        return max(self.settings.eval_every, -(-(self.env.limit or 1) // self.settings.horizon))

    def __len__(self) -> int:
        return self.settings.n_envs * self.settings.horizon * self.settings.epochs * self.per_pass

    def to(self, device: torch.device | str) -> Rollouts:
        """Return self, because environments run on the CPU; raises ValueError for any other device."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"the control task runs only on the CPU, got --device {device}: leave the option out")
        return self


@dataclass(frozen=True)
class Episodes:
    """Episodes for evaluation. The seed determines the initial states of the episodes."""

    env: Environment
    seed: int
    number: int

    def to(self, device: torch.device | str) -> Episodes:
        return self


def control(env: str = "CartPole-v1", env_steps: int | None = None, observed: Sequence[int] | None = None) -> Task:
    """Load the task of maximising the return in an environment of gymnasium.

    `env_steps` is the total number of steps in all training environments; None means the best known number. `observed`
    lists the entries of an observation that the network gets; None means all. For example, `observed=[0, 2]` hides the
    velocities of CartPole, so that only a network with a memory can balance the pole.
    """
    settings = SETTINGS.get(env, _ATARI_SETTINGS if env.startswith(ATARI) else Settings())
    if env_steps is not None:
        size = settings.n_envs * settings.horizon
        if type(env_steps) is not int or env_steps < size:
            raise ValueError(f"env_steps must be at least one rollout, {size:,} steps, got {env_steps!r}")
        settings = replace(settings, env_steps=env_steps)
    return control_task(find_environment(env, observed), settings)


def control_task(env: Environment, settings: Settings) -> Task:
    """Make the task of an environment for PPO. The learning rate falls linearly to 0, once per rollout."""
    interface = Interface(env.inputs, env.n_actions, actions="choice" if env.discrete else "vector")
    size, per_rollout = settings.n_envs * settings.horizon, settings.epochs * settings.minibatches
    recipe = Recipe(
        lr=settings.lr,
        dense_lr=settings.dense_lr,
        betas=(0.9, 0.999),
        eps=1e-5,
        batch_size=size // settings.minibatches,
        steps=settings.updates * per_rollout,
        measure_every=settings.eval_every * per_rollout,
        clip_norm=settings.clip_norm,
        schedule=lambda recipe, lr, steps: lambda step: lr * (1 - step // per_rollout * per_rollout / steps),
    )
    if len(env.inputs) == 3:
        pnet = PNETS["conv_actor_critic"](interface)
    else:
        # CartPole is symmetric in left and right, so a good policy is an odd function of the observation.
        small = env.id in ("CartPole-v1", "Pendulum-v1")
        pnet = PNETS["actor_critic"](interface, odd=env.id == "CartPole-v1", normalize=not small)

    def facts(history: History) -> dict[str, Any]:
        limit = env.threshold
        solved = (row["env_steps"] for row in history if limit is not None and row["val_mean_return"] >= limit)
        known = {"env": env.id, "episodes": env.episodes, "threshold": limit}
        trained = history[-1]["env_steps"] if history else None
        return known | {"env_steps": trained, "env_steps_to_solve": next(solved, None)}

    return Task(
        "control",
        interface,
        Rollouts(env, settings),
        Episodes(env, stream(0, _CHECKS), env.episodes),
        Episodes(env, stream(0, _FINAL), env.episodes),
        pnet,
        lambda pnet, genome_params: recipe,
        compression=10.0,
        loss=lambda net, batch: ppo_loss(net, batch, settings, env.discrete),
        evaluate=_return_metrics,
        metrics=(Metric("mean_return", "", digits=1), Metric("std_return", "", higher_is_better=False, digits=1)),
        batches=rollout_batches,
        resumable=False,
        counts=lambda steps: {"env_steps": -(-steps // per_rollout) * size},
        facts=facts,
    )


def rollout_batches(
    split: Rollouts, recipe: Recipe, generator: torch.Generator, net: Callable[[], PolicyValue]
) -> Iterator[Transitions]:
    """Yield the minibatches of one rollout after another, endlessly. A pass starts with new environments and seeds.

    For a network with a memory, a minibatch has sequences: all steps of a rollout in one environment.
    """
    settings = split.settings
    rows, per_batch = settings.n_envs * settings.horizon, recipe.batch_size
    memory = _blank(net(), settings.n_envs)
    if memory is not None:
        if per_batch % settings.horizon:
            words = f"whole sequences of {settings.horizon} steps in each minibatch"
            raise ValueError(f"a network with a memory needs {words}, got minibatches of {per_batch} steps")
        rows, per_batch = settings.n_envs, per_batch // settings.horizon
    used = len(split) // split.per_pass // recipe.batch_size * per_batch
    while True:
        seed = int(torch.randint(2**62, (), generator=generator))
        envs = make_envs(split.env.id, settings.n_envs)
        try:
            obs_NO, restarts_N = split.env.reset(envs, stream(seed, _RESETS)), np.zeros(settings.n_envs, bool)
            front: _Front = (obs_NO, restarts_N, ~restarts_N, memory)
            order = torch.Generator().manual_seed(stream(seed, _ORDER))
            for rollout in range(split.per_pass):
                with seeded(stream(seed, _ACTIONS, rollout)):
                    data, front = _rollout(envs, net(), front, split)
                index = torch.cat([torch.randperm(rows, generator=order) for _ in range(settings.epochs)])
                for index_B in index[:used].split(per_batch):
                    yield Transitions._make(None if x is None else x[index_B] for x in data)
        finally:
            envs.close()


def _blank(net: PolicyValue, n: int) -> Tensor | None:
    size = getattr(net, "memory", None)
    return torch.zeros(n, size) if isinstance(size, int) else None


def _play(
    net: PolicyValue, obs_TNO: Tensor, starts_TN: Tensor, memory_NM: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if memory_NM is None:
        numbers, values = net(obs_TNO.flatten(0, 1))
        return numbers.unflatten(0, obs_TNO.shape[:2]), values.unflatten(0, obs_TNO.shape[:2]), None
    numbers, values, memory_NM = net(obs_TNO.transpose(0, 1), starts_TN.transpose(0, 1), memory_NM)
    return numbers.transpose(0, 1), values.transpose(0, 1), memory_NM


@torch.no_grad()
def _rollout(envs: Any, net: PolicyValue, front: _Front, split: Rollouts) -> tuple[Transitions, _Front]:
    settings, discrete = split.settings, split.env.discrete
    obs, restarts, starts, steps = [front[0]], [front[1]], [front[2]], []
    first = memory = front[3]
    for _ in range(settings.horizon):
        numbers, _, memory = _play(net, obs[-1][None], torch.as_tensor(starts[-1])[None], memory)
        actions = policy(numbers[0], discrete).sample()
        obs_NO, *row = step_envs(envs, actions)
        obs.append(split.env.seen(obs_NO))
        starts.append(restarts[-1])
        restarts.append(row[1] | row[2])
        steps.append((actions, *map(torch.as_tensor, row)))
    actions_TN, rewards_TN, terminated_TN, truncated_TN = map(torch.stack, zip(*steps, strict=True))
    obs_TNO, starts_TN = torch.stack(obs), torch.as_tensor(np.stack(starts))
    numbers_TNP, values_TN, _ = _play(net, obs_TNO, starts_TN, first)
    rewards_TN = (rewards_TN.sign() if settings.reward_signs else rewards_TN).float() * settings.reward_scale
    advantages_TN = gae(rewards_TN, values_TN, terminated_TN, truncated_TN, settings.gamma, settings.lam)

    def rows(x_TN: Tensor) -> Tensor:
        return x_TN.flatten(0, 1) if first is None else x_TN.transpose(0, 1)

    data = Transitions(
        obs=rows(obs_TNO[:-1]),
        actions=rows(actions_TN),
        log_probs=rows(policy(numbers_TNP[:-1], discrete).log_prob(actions_TN)),
        advantages=rows(advantages_TN),
        returns=rows(advantages_TN + values_TN[:-1]),
        values=rows(values_TN[:-1]),
        valid=rows(torch.as_tensor(~np.stack(restarts[:-1]), dtype=torch.float32)),
        starts=None if first is None else rows(starts_TN[:-1]),
        memory=first,
    )
    return data, (obs[-1], restarts[-1], starts[-1], memory)


def play(env: Environment, number: int, seed: int, act: Callable[[Tensor], Tensor]) -> tuple[NDArray[np.float64], int]:
    """Play one episode in each of N = `number` environments. Return undiscounted returns [N] and total number of steps.

    `act` maps observations [N, O] to actions on the CPU: indices [N] or vectors [N, A].
    """
    envs = make_envs(env.id, number)
    returns_N, running_N, steps = np.zeros(number), np.ones(number, dtype=bool), 0
    try:
        obs_NO = env.reset(envs, seed)
        while running_N.any():
            array_NO, rewards_N, terminated_N, truncated_N = step_envs(envs, act(obs_NO))
            obs_NO = env.seen(array_NO)
            steps += int(running_N.sum())
            returns_N += rewards_N * running_N
            running_N &= ~(terminated_N | truncated_N)
    finally:
        envs.close()
    return returns_N, steps


@torch.no_grad()
def evaluate(net: PolicyValue, episodes: Episodes) -> NDArray[np.float64]:
    """Play each episode with the most likely actions, and return the undiscounted returns [number of episodes]."""
    env, number = episodes.env, episodes.number
    # Only the first episode of each environment counts, so the memory is emptied only before the first step.
    memory, starts_1N = _blank(net, number), torch.ones(1, number, dtype=torch.bool)

    def act(obs_NO: Tensor) -> Tensor:
        nonlocal memory, starts_1N
        numbers_1NP, _, memory = _play(net, obs_NO[None], starts_1N, memory)
        starts_1N = torch.zeros_like(starts_1N)
        return policy(numbers_1NP[0], env.discrete).mode

    return play(env, number, episodes.seed, act)[0]


def _return_metrics(net: PolicyValue, episodes: Episodes) -> dict[str, float]:
    returns = evaluate(net, episodes)
    return {"mean_return": float(returns.mean()), "std_return": float(returns.std())}


def stream(seed: int, *path: int) -> int:
    """Derive a seed below 2**32 from a seed and the integers `path`. Different paths give independent seeds."""
    return int(np.random.SeedSequence((seed, *path)).generate_state(1)[0])
