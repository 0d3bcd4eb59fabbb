"""The host side of a step: queue, plan, batch, commit. Never imports torch."""
