"""``python -m fuel_core`` is the command ``fuel``."""

from fuel_core.cli import main

if __name__ == "__main__":
    main()
