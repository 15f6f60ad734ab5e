"""`python -m clover_local`."""

import sys

from clover_local.cli.app import main

sys.exit(main())
