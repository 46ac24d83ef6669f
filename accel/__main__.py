"""Run the `accel` command with `python -m accel`."""

from .cli import main

if __name__ == "__main__":
    main()
