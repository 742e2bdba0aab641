"""The `talaria` command. May import every part of ours."""
