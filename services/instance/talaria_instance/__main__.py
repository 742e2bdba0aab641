"""`python -m talaria_instance --config FILE --id IID`."""

import sys

from talaria_instance.main import main

if __name__ == "__main__":
    sys.exit(main())
