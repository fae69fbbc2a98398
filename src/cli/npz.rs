//! `.npz` files: zip archives of `.npy` arrays. Arrays are [`Literal`]s with their bytes inline.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipArchive, ZipWriter};

use super::npy::{self, Header, NpyError};
use crate::ir::Literal;
use crate::package::open_file;

/// Why a `.npz` file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NpzError {
    /// The file cannot be opened, created or moved into place.
    #[error("{}", .0.display())]
    Io(PathBuf, #[source] std::io::Error),
    /// The archive is damaged.
    #[error("{} is not an .npz file", .0.display())]
    Zip(PathBuf, #[source] zip::result::ZipError),
    /// An array is damaged or of a kind that is not supported.
    #[error("{}: array `{name}`", path.display())]
    Array {
        /// The file.
        path: PathBuf,
        /// The array.
        name: String,
        /// What is wrong.
        #[source]
        source: NpyError,
    },
}

/// An open `.npz` file. Arrays are read, and decompressed, only when they are asked for.
#[derive(Debug)]
pub struct Npz<R = BufReader<File>> {
    path: PathBuf,
    archive: ZipArchive<R>,
    /// Position in the archive by array name, which is without `.npy`.
    entries: BTreeMap<String, usize>,
}

impl Npz {
    /// Opens a file.
    ///
    /// # Errors
    /// When it cannot be opened or is no zip archive.
    pub fn open(path: &Path) -> Result<Npz, NpzError> {
        let file = open_file(path).map_err(|e| NpzError::Io(path.into(), e))?;
        Npz::new(path, BufReader::new(file))
    }
}

impl<R: Read + Seek> Npz<R> {
    fn new(path: &Path, reader: R) -> Result<Npz<R>, NpzError> {
        let zip_error = |e| NpzError::Zip(path.into(), e);
        let archive = ZipArchive::new(reader).map_err(zip_error)?;
        let names = archive.file_names().enumerate().map(|(i, name)| {
            let name = name?;
            Ok((name.strip_suffix(".npy").unwrap_or(&name).to_owned(), i))
        });
        let entries = names.collect::<Result<_, _>>().map_err(zip_error)?;
        Ok(Npz { path: path.into(), archive, entries })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the arrays, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Element type and shape of an array; `None` when there is none of this name.
    ///
    /// # Errors
    /// When its header cannot be read, or the archive declares another size than the header.
    pub fn header(&mut self, name: &str) -> Result<Option<Header>, NpzError> {
        self.entry(name, |entry, header| match header.header_len.checked_add(header.byte_len) {
            Some(size) if size == entry.size() => Ok(header),
            _ => {
                let found = entry.size().saturating_sub(header.header_len);
                Err(NpyError::Length { declared: header.byte_len, found })
            }
        })
    }

    /// An array; `None` when there is none of this name.
    ///
    /// # Errors
    /// When it is damaged or of a type that is not supported.
    pub fn read(&mut self, name: &str) -> Result<Option<Literal>, NpzError> {
        self.entry(name, |entry, header| npy::read_elements(&header, entry))
    }

    fn entry<T>(
        &mut self,
        name: &str,
        then: impl FnOnce(&mut zip::read::ZipFile<'_, R>, Header) -> Result<T, NpyError>,
    ) -> Result<Option<T>, NpzError> {
        let Some(&index) = self.entries.get(name) else { return Ok(None) };
        let mut entry = self.archive.by_index(index).map_err(|e| NpzError::Zip(self.path.clone(), e))?;
        npy::read_header(&mut entry)
            .and_then(|header| then(&mut entry, header))
            .map(Some)
            .map_err(|source| NpzError::Array { path: self.path.clone(), name: name.into(), source })
    }
}

/// Writes arrays, sorted by name; equal arrays give equal bytes. The file appears whole or not at all.
///
/// # Errors
/// When an array is of a type that numpy does not have, or writing fails.
pub fn write(path: &Path, arrays: &BTreeMap<String, Literal>) -> Result<(), NpzError> {
    let io = |e| NpzError::Io(path.into(), e);
    let mut partial = path.file_name().unwrap_or_default().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = path.with_file_name(partial);
    let written = File::create(&partial).map_err(io).and_then(|file| {
        let mut out = BufWriter::new(file);
        write_to(path, arrays, &mut out)?;
        out.flush().map_err(io)
    });
    let moved = written.and_then(|()| std::fs::rename(&partial, path).map_err(io));
    if moved.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(&partial);
    }
    moved
}

fn write_to(path: &Path, arrays: &BTreeMap<String, Literal>, out: impl Write + Seek) -> Result<(), NpzError> {
    let zip_error = |e| NpzError::Zip(path.into(), e);
    let mut zip = ZipWriter::new(out);
    for (name, array) in arrays {
        let large = array.ty.as_tensor().and_then(|t| t.byte_len()).is_none_or(|n| n >= 1 << 31);
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .last_modified_time(DateTime::default())
            .unix_permissions(0o644)
            .large_file(large);
        zip.start_file(format!("{name}.npy"), options).map_err(zip_error)?;
        npy::write(array, &mut zip).map_err(|source| NpzError::Array {
            path: path.into(),
            name: name.clone(),
            source,
        })?;
    }
    zip.finish().map_err(zip_error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::ir::DType;

    /// Written by `numpy.savez_compressed(a=numpy.arange(6, dtype="<i8").reshape(2, 3), b=numpy.float16(0.1),
    /// c=numpy.asfortranarray([[1.5, 2.5]], dtype=">f8"), d=numpy.array([True, False]))`.
    const FROM_NUMPY: &[u8] = include_bytes!("testdata/numpy.npz");

    fn open(bytes: &[u8]) -> Result<Npz<Cursor<&[u8]>>, NpzError> {
        Npz::new(Path::new("in.npz"), Cursor::new(bytes))
    }

    #[test]
    fn compressed_archives_of_numpy() {
        let mut npz = open(FROM_NUMPY).unwrap();
        assert_eq!(npz.names().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
        let ints = |l: &Literal| l.to_ints(&crate::ir::NoWeights).unwrap();
        let a = npz.read("a").unwrap().unwrap();
        assert_eq!((a.ty.to_string().as_str(), ints(&a)), ("tensor<int64, [2, 3]>", vec![0, 1, 2, 3, 4, 5]));
        assert_eq!(npz.read("b").unwrap(), Some(Literal::floats(DType::F16, &[], &[0.1])));
        assert_eq!(npz.read("c").unwrap(), Some(Literal::floats(DType::F64, &[1, 2], &[1.5, 2.5])));
        assert_eq!(npz.read("d").unwrap(), Some(Literal::bools(&[true, false])));
        assert_eq!(npz.header("a").unwrap().unwrap().ty.to_string(), "tensor<int64, [2, 3]>");
        assert!(npz.read("e").unwrap().is_none());
    }

    #[test]
    fn written_archives_re_read_and_depend_on_their_arrays_alone() {
        let arrays = BTreeMap::from([
            ("x".to_owned(), Literal::floats(DType::F16, &[2, 1], &[1.0, f64::NEG_INFINITY])),
            ("out_y".to_owned(), Literal::floats(DType::F64, &[], &[0.1])),
        ]);
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("1.npz"), dir.path().join("2.npz"));
        write(&one, &arrays).unwrap();
        write(&two, &arrays).unwrap();
        assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());
        let mut npz = Npz::open(&one).unwrap();
        for (name, array) in &arrays {
            assert_eq!(npz.read(name).unwrap().as_ref(), Some(array));
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing partial is left");
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.npz");
        std::fs::write(&path, "old").unwrap();
        let arrays = BTreeMap::from([("s".to_owned(), Literal::string("no array"))]);
        assert!(matches!(write(&path, &arrays), Err(NpzError::Array { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn damaged_archives_are_refused() {
        assert!(matches!(open(b"no zip at all"), Err(NpzError::Zip(..))));
        // Cutting anywhere, or changing any one byte, gives an error or arrays, never a panic.
        for at in 0..FROM_NUMPY.len() {
            let cut = open(&FROM_NUMPY[..at]).is_err();
            assert!(cut, "the directory is at the end, {at} bytes are not enough");
            let mut bytes = FROM_NUMPY.to_vec();
            bytes[at] ^= 0x41;
            if let Ok(mut npz) = open(&bytes) {
                for name in npz.names().map(str::to_owned).collect::<Vec<_>>() {
                    let _ = (npz.header(&name), npz.read(&name));
                }
            }
        }
    }

    #[test]
    fn an_entry_that_inflates_beyond_its_header_is_refused() {
        let mut bytes = Cursor::new(Vec::new());
        let mut zip = ZipWriter::new(&mut bytes);
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        zip.start_file("bomb.npy", options).unwrap();
        npy::write(&Literal::bool(true), &mut zip).unwrap();
        zip.write_all(&vec![0; 1 << 20]).unwrap();
        zip.finish().unwrap();
        let mut npz = open(bytes.get_ref()).unwrap();
        let lengths = |e| match e {
            NpzError::Array { source: NpyError::Length { declared, found }, .. } => (declared, found),
            other => panic!("{other}"),
        };
        assert_eq!(lengths(npz.header("bomb").unwrap_err()), (1, (1 << 20) + 1));
        assert_eq!(lengths(npz.read("bomb").unwrap_err()), (1, 2), "no more than needed is inflated");
    }
}
