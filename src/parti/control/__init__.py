"""Decisions of the control plane: pure steps over frozen values. No asyncio, no nats, no clock of its own."""
