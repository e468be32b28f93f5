"""The best ranking that the training pairs of a generated data set allow: by the posterior of the planted scores.

    python -m benchmarks.cases.recommenders.attainable              # tiny, three seeds: a minute and a half
    python -m benchmarks.cases.recommenders.attainable dense --seeds 1

`untuned` compares with the ranking by the true scores, which no method knows. Here the scores are drawn from their
posterior distribution: the model, its numbers of factors and its scales are the generator's, and only the factors and
popularities are unknown. An item is ranked by its mean probability to be the next one, which no other method beats on
average. Two chains of Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011) start at different places; "one chain"
says how far they agree.

A user takes the items with the largest score + Gumbel noise. This is the order in which clocks of the rates exp(score)
ring, so with the time at which the user stopped the likelihood is a product over the items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases.training import untuned
from benchmarks.cases.training.untuned import FACTORS, SHAPES, Pairs, Shape

LEAPS = 20
# Before its samples a chain has so many turns, as a part of them, in which it finds its place and its step size.
WARM_UP = 0.75


def main(arguments: list[str] | None = None) -> None:
    """Print what the posterior reaches, for each seed and in the mean."""
    names = [name for name in SHAPES if name != "long-tail"]  # whose chains would take days
    options = untuned.parser(__doc__, names, default="tiny")
    chosen = untuned.chosen_by(options, names, arguments)
    samples = 60 if chosen.tiny else 400
    for name in chosen.names or ["tiny"]:
        reached = []
        for seed in range(1 if chosen.tiny else chosen.seeds):
            pairs = untuned.generated(SHAPES[name], seed)
            chains = [predicted(SHAPES[name], pairs, 2 * seed + chain, samples) for chain in range(2)]
            optimum, both, *each = (
                untuned.judged(scores.__getitem__, pairs)["ndcg@10"]
                for scores in (pairs.optimum, (chains[0] + chains[1]).numpy(), *(one.numpy() for one in chains))
            )
            reached.append((both, optimum))
            alone = ", ".join(f"{one / optimum:.1%}" for one in each)
            print(f"  seed {seed}: {both:.4f} of {optimum:.4f}, {both / optimum:.1%}; one chain {alone}", flush=True)
        both, optimum = np.mean(reached, 0)
        print(f"{name:10} attainable ndcg@10 {both:.4f}, planted optimum {optimum:.4f}: {both / optimum:.1%}")


class Posterior(NamedTuple):
    """Log density of the unknowns of a data set: factors and popularities in units of their deviation, and stops.

    Args:
        taken: ``bool[users, items]``, the training pairs.
        scale: of the product of two factors.
        popularity: mean and standard deviation over the items.
    """

    taken: Tensor
    scale: float
    popularity: tuple[float, float]

    def scores(self, unknown: Tensor) -> Tensor:
        """Return ``float64[users, items]``."""
        users, items = self.taken.shape
        own, their, popular, _ = unknown.split([users * FACTORS, items * FACTORS, items, users])
        mean, deviation = self.popularity
        return self.scale / FACTORS * own.view(users, -1) @ their.view(items, -1).T + popular * deviation + mean

    def slope(self, unknown: Tensor) -> tuple[float, Tensor]:
        """Return the log density and its gradient."""
        unknown = unknown.detach().requires_grad_()
        stops = unknown[-self.taken.shape[0] :]  # logarithms of times, with a flat prior
        rings = (self.scores(unknown) + stops[:, None]).exp()
        likely = torch.where(self.taken, (-torch.expm1(-rings)).clamp_min(1e-300).log(), -rings).sum()
        density = likely - unknown[: -len(stops)].square().sum() / 2
        (slope,) = torch.autograd.grad(density, unknown)
        return density.item(), slope


def predicted(shape: Shape, pairs: Pairs, seed: int, samples: int) -> Tensor:
    """Return the mean over samples of the probability of each item to be the next one, ``float64[users, items]``."""
    taken = torch.zeros(shape.users, shape.items, dtype=torch.bool)
    taken[pairs.train[:, 0], pairs.train[:, 1]] = True
    popular = -shape.popularity * np.log(1 + np.arange(shape.items))  # in an unknown order
    posterior = Posterior(taken, shape.affinity * FACTORS**0.5, (popular.mean(), popular.std()))
    random = torch.Generator().manual_seed(seed)
    count = shape.users * (FACTORS + 1) + shape.items * (FACTORS + 1)
    at = torch.randn(count, generator=random, dtype=torch.float64)
    at[-shape.users :] = 0
    density, slope = posterior.slope(at)
    size, total = 0.01, torch.zeros(taken.shape, dtype=torch.float64)
    warm_up = int(WARM_UP * samples)
    for turn in range(warm_up + samples):
        speed = torch.randn(count, generator=random, dtype=torch.float64)
        energy = density - speed.square().sum().item() / 2
        moved, its_density, its_slope = at, density, slope
        for _ in range(LEAPS):
            speed = speed + size / 2 * its_slope
            moved = moved + size * speed
            its_density, its_slope = posterior.slope(moved)
            speed = speed + size / 2 * its_slope
        change = its_density - speed.square().sum().item() / 2 - energy
        accepted = torch.rand(1, generator=random).log().item() < change
        if accepted:
            at, density, slope = moved, its_density, its_slope
        if turn < warm_up:
            size *= 1.03 if accepted else 0.94  # two of three are accepted
        else:
            total += posterior.scores(at).masked_fill(taken, -torch.inf).softmax(1)
    return total / samples


if __name__ == "__main__":
    main()
