//! Reading files, and nothing that merely has a name like one: opening a pipe would wait for its writer forever.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// The content of a regular file.
pub(super) fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}
