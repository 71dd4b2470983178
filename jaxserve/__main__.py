"""`python -m jaxserve`: the command line."""

from jaxserve.cli import main

if __name__ == "__main__":
    main()
