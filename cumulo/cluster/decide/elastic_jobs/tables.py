"""The speed tables of elastic jobs, each once, as arrays: thousands of jobs have a few dozen of them."""

import numpy as np

from cumulo.cluster.decide.jobs import SpeedTable
from cumulo.cluster.decide.nodes import Ints


class SpeedTables:
    """The tables of all jobs, each once, as arrays."""

    def __init__(self) -> None:
        self.tables: list[SpeedTable] = []
        self._dense: list[tuple[Ints, Ints]] = []
        self._number_of: dict[int, int] = {}
        self._goodputs: tuple[tuple[bytes, int, int], Ints] | None = None
        self._fair: tuple[tuple[int, int, int], Ints] | None = None

    def __len__(self) -> int:
        return len(self.tables)

    def number(self, speed: SpeedTable | None) -> int:
        assert speed is not None
        known = self._number_of.get(id(speed))
        if known is None:
            known = self._number_of[id(speed)] = len(self.tables)
            self._dense.append((np.array(speed.one_node), np.array(speed.many_nodes)))
            self.tables.append(speed)  # kept, so that no other object gets its id
        return known

    def within(self, table: int, share: int, node_gpus: int) -> float:
        """The goodput of the largest possible size within a share."""
        speed = self.tables[table]
        largest = max(len(speed.one_node), len(speed.many_nodes))  # few jobs may have shares of thousands
        for size in range(min(share, largest), 0, -1):
            found = speed.goodput(size, -(-size // node_gpus))
            if found > 0:
                return found
        return 1.0

    def fair(self, share: int, node_gpus: int) -> Ints:
        """The same of each table; the last ones are kept, because shares seldom change."""
        key = share, node_gpus, len(self.tables)
        if self._fair is None or self._fair[0] != key:
            found = [self.within(table, share, node_gpus) for table in range(len(self.tables))]
            self._fair = key, np.array(found)
        return self._fair[1]

    def goodputs(self, sizes: Ints, node_gpus: int) -> Ints:
        """[tables, sizes]; the last one is kept, because sizes and tables seldom change."""
        key = sizes.tobytes(), node_gpus, len(self.tables)
        if self._goodputs is not None and self._goodputs[0] == key:
            return self._goodputs[1]
        found = np.zeros((len(self.tables), len(sizes)))
        for row, (one, many) in enumerate(self._dense):
            for column, inside in ((one, sizes <= node_gpus), (many, sizes > node_gpus)):
                known = inside & (sizes > 0) & (sizes <= len(column))
                found[row, known] = column[sizes[known] - 1]
        self._goodputs = key, found
        return found
