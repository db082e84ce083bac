"""`cachalot bench`: shows how fast a cluster is, beside what the machine can do."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import write_json, write_result

COLUMNS = f"{'benchmark':<20} {'blocks':>7} {'value':>9} {'unit':<5}  remarks"


def bench(
    cluster: Annotated[Path, typer.Option(help="The cluster map.", metavar="FILE")],
    blocks: Annotated[
        int, typer.Option(help="Blocks saved and fetched at once.", min=1, max=65536)
    ] = 1024,
    block_bytes: Annotated[
        int, typer.Option(help="Bytes of a block.", min=1024, max=16 << 20)
    ] = 113_920,
    rounds: Annotated[
        int, typer.Option(help="How often the rates are measured.", min=1, max=1000)
    ] = 9,
    large_blocks: Annotated[
        int,
        typer.Option(help="Also fetch so many at once: the cost is linear.", min=0, max=65536),
    ] = 0,
    is_json: Annotated[
        bool, typer.Option("--json", help="A JSON object for each figure, one on each line.")
    ] = False,
) -> None:
    """Measure a cluster: fetch, save and match beside memcpy and raw sockets.

    Stores blocks of random bytes and removes them again. Rates count the bytes of blocks.
    """
    # Here, because the client and numpy take longer to load than `--help` should.
    import asyncio

    from ..cluster.map import load_cluster_map
    from .bench import BenchOptions, run_bench
    from .bench_failure import BenchFailed
    from .nodes_down import NodesDown

    needed = load_cluster_map(cluster).code.k
    options = BenchOptions(
        blocks=blocks, block_bytes=block_bytes, rounds=rounds, large_blocks=large_blocks
    )
    alive, dead = asyncio.run(_ask_nodes(cluster))
    if len(alive) < needed:
        raise NodesDown(dead)
    if not is_json:
        write_result(COLUMNS)
    report = write_json if is_json else _write_line
    try:
        asyncio.run(run_bench(cluster, options, report))
    except BenchFailed as error:
        _, dead = asyncio.run(_ask_nodes(cluster))
        if dead:
            raise NodesDown(dead, error) from error
        raise


async def _ask_nodes(cluster: Path) -> tuple[list[str], list[str]]:
    """Names of the nodes that answer, and of those that do not."""
    from ..client import StoreClient

    async with StoreClient.connect(cluster) as store:
        reports = await store.node_reports()
    return (
        [one.node for one in reports if one.is_alive],
        [one.node for one in reports if not one.is_alive],
    )


def _write_line(figure: dict[str, Any]) -> None:
    """One figure as a line; what it was measured on is in the JSON only."""
    known = {"benchmark", "blocks", "value", "unit", "parameters", "machine", "commit"}
    remarks = ", ".join(f"{name} {value}" for name, value in figure.items() if name not in known)
    write_result(
        f"{figure['benchmark']:<20} {figure['blocks']:>7} {figure['value']:>9} "
        f"{figure['unit']:<5}  {remarks}"
    )
