"""The `rlq` command, one module per subcommand."""
