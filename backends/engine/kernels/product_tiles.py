"""Tile sizes of the products with quantised weights."""

from __future__ import annotations

from typing import Any, NamedTuple


class ProductTiles(NamedTuple):
    """The tile of a program, a part of the numerics class.

    Attributes:
      rows: rows of the activations.
      columns: outputs of the weight.
      depth: inputs of a step.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight, plus the step that computes.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, Any]:
        """Return the options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiles_for(
    rows: int, variants: tuple[ProductTiles, ...], group: int, least: int
) -> ProductTiles:
    """Return the tile for a number of rows, with the depth for a group.

    Args:
      rows: number of rows of the product.
      variants: the tiles, by ascending rows. The last one has no limit.
      group: inputs that share a scale. A step is of one group.
      least: the least depth of a matrix instruction.
    """
    chosen = next((tiles for tiles in variants if rows <= tiles.rows), variants[-1])
    depth = 1 << (group - 1).bit_length()
    return chosen._replace(depth=max(least, min(depth, chosen.depth)))
