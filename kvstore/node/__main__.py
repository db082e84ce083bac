"""`python -m kvstore.node` is `kvstored`."""

import sys

from .main import main

sys.exit(main())
