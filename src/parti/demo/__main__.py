"""`python -m parti.demo`."""

from parti.demo.command import main

main()
