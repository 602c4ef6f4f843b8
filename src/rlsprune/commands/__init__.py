"""The commands. Only they and `rlsprune.terminal` know the terminal; torch is imported when a command needs it."""

from rlsprune.commands.app import execute

__all__ = ["execute"]
