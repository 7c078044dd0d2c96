"""`parti group`: consumer groups, with the verbs and aliases of the reference's `cg`.

Promises: it prints and refuses the same as `cg`.

Flow: `parse` -> `session` -> `verbs` -> `parti.groups`.
"""

from __future__ import annotations

import click

from parti.cli.group.aliases import AliasGroup
from parti.cli.group.elastic import compact, elastic
from parti.cli.group.prompt import prompt
from parti.cli.group.static import static


@click.group(cls=AliasGroup)
def group() -> None:
    """Partitioned consumer groups, compatible with the Go and Java ones.

    A static group reads a stream whose subjects begin with the partition number; an elastic group adds the number in
    a work queue of its own, and its members may come and go.
    """


group.add_command(static)
group.add_command(elastic)
group.add_command(compact)
group.add_command(prompt)
