"""The command line. Only this package writes to the terminal; torch is imported when a command needs it."""
