"""`python -m shardline`: the same as the `shardline` command."""

from shardline.cli.main import main

if __name__ == "__main__":
    main()
