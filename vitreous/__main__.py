"""`python -m vitreous`."""

from vitreous.cli.main import main

if __name__ == "__main__":
    main()
