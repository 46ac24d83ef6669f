"""`accel` as a module: `python -m accel.cli`."""

from . import main

if __name__ == "__main__":
    main()
