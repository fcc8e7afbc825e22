"""Run the command line: `python -m vitreous VERB …` is the same as `vitreous VERB …`."""

from vitreous.cli.main import main

if __name__ == "__main__":
    main()
