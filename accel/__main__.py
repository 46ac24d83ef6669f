"""`accel` as a module: `python -m accel`."""

from .cli import main

if __name__ == "__main__":
    main()
