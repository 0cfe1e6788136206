from outlast.cli import main

raise SystemExit(main())
