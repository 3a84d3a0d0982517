//! The embedded store: one file, one table, one fsync a batch.

use std::path::Path;

use redb::{Database, Durability, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Store, StoreError, StoreOp};

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("farpool");

/// A redb file. Only one process can have it open.
#[derive(Debug)]
pub struct RedbStore {
    database: Database,
}

fn io(error: impl std::fmt::Display) -> StoreError {
    StoreError::Io(error.to_string())
}

impl RedbStore {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// The file cannot be created, is no redb file, or another process has it open.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let open = |reason: String| StoreError::Open { path: path.display().to_string(), reason };
        let database = Database::create(path).map_err(|error| open(error.to_string()))?;
        let mut store = Self { database };
        // Creates the table, so that loading an empty store finds it.
        store.commit(&[])?;
        Ok(store)
    }
}

impl Store for RedbStore {
    fn load(&mut self) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let read = self.database.begin_read().map_err(io)?;
        let table = read.open_table(TABLE).map_err(io)?;
        let mut all = Vec::new();
        for pair in table.iter().map_err(io)? {
            let (key, value) = pair.map_err(io)?;
            all.push((key.value().to_owned(), value.value().to_vec()));
        }
        Ok(all)
    }

    fn commit(&mut self, ops: &[StoreOp]) -> Result<(), StoreError> {
        let mut write = self.database.begin_write().map_err(io)?;
        write.set_durability(Durability::Immediate).map_err(io)?;
        {
            let mut table = write.open_table(TABLE).map_err(io)?;
            for op in ops {
                match op {
                    StoreOp::Put(key, value) => {
                        table.insert(key.as_str(), value.as_slice()).map_err(io)?;
                    }
                    StoreOp::Delete(key) => {
                        table.remove(key.as_str()).map_err(io)?;
                    }
                }
            }
        }
        write.commit().map_err(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_committed_is_there_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let put = |key: &str, value: &str| StoreOp::Put(key.into(), value.into());
        let mut store = RedbStore::open(&path).unwrap();
        assert!(store.load().unwrap().is_empty());
        store.commit(&[put("a", "1"), put("b", "2")]).unwrap();
        store.commit(&[StoreOp::Delete("a".into()), put("b", "3")]).unwrap();
        assert!(RedbStore::open(&path).is_err(), "two processes have it open");
        drop(store);
        let mut store = RedbStore::open(&path).unwrap();
        assert_eq!(store.load().unwrap(), [("b".to_owned(), b"3".to_vec())]);
    }

    #[test]
    fn a_file_that_is_no_store_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        std::fs::write(&path, vec![7; 10_000]).unwrap();
        let error = RedbStore::open(&path).unwrap_err();
        assert!(error.to_string().contains("store"), "{error}");
    }
}
