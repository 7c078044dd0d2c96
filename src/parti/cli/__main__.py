"""`python -m parti.cli` is the `parti` command."""

from parti.cli import main

main()
