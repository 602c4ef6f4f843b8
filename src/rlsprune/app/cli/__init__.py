"""The command line. Nothing else in the package knows the terminal; torch is imported when a command needs it."""
