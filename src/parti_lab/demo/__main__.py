"""`python -m parti_lab.demo`."""

from parti_lab.demo.command import main

main()
