# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One tile: from codes to weights
#
# A g-net computes a weight from the **codes** of the weight's row and column. This notebook examines one g-net: the
# codes, the parameters, the tile that the g-net generates, and the two thin factors of the tile. At the end, several
# tiles form a matrix.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

import gbfunc as gb
from gbfunc.plots import WEIGHTS
from gbfunc.tiling import join_tiles, split_tiles, tile_grid

# %% [markdown]
# ## Codes
#
# By default, the code of a row consists of the bits of the row's number. `binary` uses plain binary numbers. `gray`
# uses Gray codes, in which the codes of neighbouring rows differ in one bit. For the pixels of an image, coordinates
# are a better code than bits. Each of the 64 pixels of an 8 x 8 image has a code of two coordinates instead of six
# bits.

# %%
shown = {
    "binary(): 64 rows": gb.binary().codes(64),
    "gray(): 64 rows": gb.gray().codes(64),
    "grid(8, 8): 64 pixels": gb.grid(8, 8).codes(64),
}
fig, axes = plt.subplots(1, 3, figsize=(9, 4), layout="constrained", width_ratios=[6, 6, 3])
for ax, (title, codes) in zip(axes, shown.items(), strict=True):
    image = ax.imshow(codes, cmap=WEIGHTS, aspect="auto", interpolation="nearest")
    ax.set(title=title, xlabel="number in the code", ylabel="position on the axis", xticks=range(codes.shape[1]))
    fig.colorbar(image, ax=ax, label="value")
plt.show()

# %% [markdown]
# ## One g-net
#
# The layer of this example reads images of 8 x 8 pixels. One periodic g-net with four sines generates all 32 x 64
# weights of the layer. The leaves of the g-net are tensors of trained parameters: 36 numbers for 2,048 weights. With
# a smaller `bandwidth`, neighbouring weights differ less. The value 2 makes the picture easy to read.

# %%
torch.manual_seed(0)
layer = nn.Linear(64, 32, bias=False)
plan = gb.make_plan(layer, gb.periodic(features=4), encodings={"weight": (gb.binary(), gb.grid(8, 8, bandwidth=2.0))})
genome = gb.init_genome(plan, layer, seed=11)
(leaves,) = genome.gnets.values()
print({name: tuple(leaf.shape[1:]) for name, leaf in leaves.items()})
print(f"{plan.genome_params} parameters make {plan.pnet_params:,} weights")

# %% [markdown]
# The weight of row *i* and column *j* is a sum of sines of the codes, $w_{ij} = \sigma \sum_h v_h \sin(A_{ih} +
# B_{jh})$ with $A = X_r W_r + \phi$ and $B = X_c W_c$. $\sigma$ is the standard deviation of the layer's initial
# weights. The next cell computes this formula and compares the result with the library.

# %%
row_codes = torch.from_numpy(gb.binary().codes(32)).float()
col_codes = torch.from_numpy(gb.grid(8, 8, bandwidth=2.0).codes(64)).float()
A = row_codes @ leaves["row_weight"][0] + leaves["phase"][0]
B = col_codes @ leaves["col_weight"][0]
v = leaves["amplitude"][0] * plan.tensors[0].slots[0].scale
sines = [v[h] * torch.sin(A[:, h, None] + B[None, :, h]) for h in range(4)]
tile = gb.generate(plan, genome)["weight"]
torch.testing.assert_close(sum(sines), tile)

limit = float(tile.abs().max())
style = dict(cmap=WEIGHTS, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
fig, axes = plt.subplots(1, 5, figsize=(11, 2.6), layout="constrained", sharey=True)
for h, (ax, sine) in enumerate(zip(axes, sines, strict=False)):
    ax.imshow(sine, **style)
    ax.set(title=("" if h == 0 else "+ ") + f"sine {h + 1}", xlabel="column (pixel)")
image = axes[4].imshow(tile, **style)
axes[4].set(title="= the tile", xlabel="column (pixel)")
axes[0].set_ylabel("row (unit)")
fig.colorbar(image, ax=axes, label="weight")
plt.show()

# %% [markdown]
# Each row of the tile is an image of 8 x 8 pixels. The image is a sum of plane waves. The bits of the row's number
# determine the phases of the waves.

# %%
fig, axes = plt.subplots(2, 8, figsize=(9, 2.6), layout="constrained")
for i, ax in enumerate(axes.flat):
    image = ax.imshow(tile[i].reshape(8, 8), cmap=WEIGHTS, vmin=-limit, vmax=limit)
    ax.set(xticks=[], yticks=[])
    ax.set_title(f"unit {i}", fontsize=8)
fig.colorbar(image, ax=axes, label="weight")
fig.suptitle("What the first 16 units respond to (8 x 8 pixels each)", fontsize=10)
plt.show()

# %% [markdown]
# ## The tile as a product
#
# Because $\sin(a + b) = \sin a \cos b + \cos a \sin b$, the tile equals a product $L R^\top$. The factors $L$ and $R$
# have two columns per sine. To generate the tile, one matrix product is enough. A layer can also apply the two
# factors to its inputs, one after the other, without forming the weights. The next cell does so for the digits.

# %%
L = torch.cat([torch.sin(A) * v, torch.cos(A) * v], 1)
R = torch.cat([torch.cos(B), torch.sin(B)], 1)
torch.testing.assert_close(L @ R.T, tile)
grown = gb.materialize(plan, genome, layer, factored=True)  # its parameters are the factors
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
torch.testing.assert_close(grown(images), images @ tile.T)
torch.testing.assert_close((images @ R) @ L.T, images @ tile.T)
print(f"L {tuple(L.shape)}, R {tuple(R.shape)}: {L.numel() + R.numel()} numbers instead of {tile.numel():,}")

fig, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", width_ratios=[1, 4, 4])
for ax, matrix, title, xlabel, ylabel in [
    (axes[0], L, "L", "factor", "row (unit)"),
    (axes[1], R.T, r"$\times\ R^\top$", "column (pixel)", "factor"),
    (axes[2], L @ R.T, "= the tile", "column (pixel)", "row (unit)"),
]:
    bound = float(matrix.abs().max())
    image = ax.imshow(matrix, **style | dict(vmin=-bound, vmax=bound))
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    fig.colorbar(image, ax=ax, label="value")
plt.show()

# %% [markdown]
# ## Tiles form a matrix
#
# A large matrix can be divided into tiles, each with its own g-net. The tiles have at most the size `max_tile`, and
# the division is as even as possible. Where a tile extends beyond the edge of the matrix, the tile is cropped.

# %%
grid = tile_grid((52, 90), max_tile=(20, 25))
number = torch.arange(grid.n_tiles).reshape(-1, 1, 1).expand(-1, grid.tile_rows, grid.tile_cols)
fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
ax.imshow(join_tiles(number, grid), cmap="cividis", alpha=0.6)
for t in range(grid.n_tiles):
    i, j = divmod(t, grid.n_cols)
    right, bottom = min((j + 1) * grid.tile_cols, grid.cols), min((i + 1) * grid.tile_rows, grid.rows)
    x, y = (j * grid.tile_cols + right) / 2, (i * grid.tile_rows + bottom) / 2
    ax.text(x, y, f"tile {t}", ha="center", va="center")
title = f"A matrix of 52 x 90 in {grid.n_tiles} tiles of {grid.tile_rows} x {grid.tile_cols}"
ax.set(title=title, xlabel="column", ylabel="row")
plt.show()

# %% [markdown]
# Splitting a matrix into tiles and joining the tiles must give the same matrix: `join(split(W)) == W` for every
# matrix and every size of tile. The next cell uses the library hypothesis to search for a counterexample among one
# thousand matrices and sizes of tiles.

# %%
sizes = st.integers(1, 40)
tried = 0


@settings(max_examples=1_000, deadline=None, database=None)
@given(rows=sizes, cols=sizes, tile=st.tuples(sizes, sizes), seed=st.integers(0, 2**32))
def join_undoes_split(rows, cols, tile, seed):
    global tried
    tried += 1
    grid = tile_grid((rows, cols), tile)
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    tiles = split_tiles(matrix, grid)
    assert tiles.shape == (grid.n_tiles, grid.tile_rows, grid.tile_cols)
    assert grid.tile_rows <= tile[0] and grid.tile_cols <= tile[1]
    assert torch.equal(join_tiles(tiles, grid), matrix)


join_undoes_split()
print(f"{tried:,} tilings, no counterexample")
