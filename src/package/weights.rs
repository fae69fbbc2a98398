//! Weight files, MIL blob storage version 2: read by position, written in order.
//!
//! A file starts with a 64-byte header (blob count, version 2); each blob has a 64-byte record that names its element
//! type, size and data offset. Source: `MILBlob/Blob/StorageFormat.hpp` of coremltools.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::PackageError;
use super::files::open_file;
use crate::ir::{BlobRef, DType, LiteralError, TensorType, Weights};

/// `BlobDataType` numbers.
const BLOB_TYPES: &[(u32, DType)] = &[
    (1, DType::F16),
    (2, DType::F32),
    (3, DType::U8),
    (4, DType::I8),
    (5, DType::BF16),
    (6, DType::I16),
    (7, DType::U16),
    (8, DType::I4),
    (9, DType::U1),
    (10, DType::U2),
    (11, DType::U4),
    (12, DType::U3),
    (13, DType::U6),
    (14, DType::I32),
    (15, DType::U32),
    (16, DType::F8E4M3FN),
    (17, DType::F8E5M2),
];

const SENTINEL: u32 = 0xDEAD_BEEF;
const ALIGNMENT: usize = 64;

/// The weight files of one package.
#[derive(Debug)]
pub(super) struct FileWeights {
    place: ModelPlace,
    files: Mutex<HashMap<Arc<str>, Arc<File>>>,
    /// Small integer constants: indices and shapes, which analyses ask for again and again.
    small: Mutex<HashMap<(BlobRef, TensorType), Vec<u8>>>,
    bytes_read: AtomicU64,
}

/// Largest integer constant that is kept in memory.
const MAX_KEPT: u64 = 65_536;

/// Where the paths in a program start and what they may not leave.
#[derive(Clone, Debug)]
pub(super) struct ModelPlace {
    /// What `@model_path` stands for: the directory that holds the model file.
    pub(super) model_dir: PathBuf,
    /// The package, or for a bare model file its directory.
    pub(super) root: PathBuf,
    pub(super) follow_symlinks: bool,
}

impl ModelPlace {
    /// The file that a program calls `file`, which need not exist.
    pub(super) fn resolve(&self, file: &str) -> Result<PathBuf, PackageError> {
        let relative = relative_path(file).ok_or_else(|| self.escapes(file))?;
        let path = self.model_dir.join(relative);
        inside(&self.root, &path, self.follow_symlinks)?;
        Ok(path)
    }

    fn escapes(&self, file: &str) -> PackageError {
        PackageError::Escapes { path: file.into(), package: self.root.clone() }
    }
}

/// The path of a weight file under the model's directory; `None` when it leads out of it.
pub(super) fn relative_path(file: &str) -> Option<&Path> {
    let path = Path::new(file.strip_prefix("@model_path/").unwrap_or(file));
    let plain = path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    (plain && !file.is_empty()).then_some(path)
}

/// Checks that a path, once symbolic links are resolved, lies under `root`. A path that does not exist is fine.
pub(super) fn inside(root: &Path, path: &Path, follow_symlinks: bool) -> Result<(), PackageError> {
    if follow_symlinks {
        return Ok(());
    }
    let (Ok(real), Ok(real_root)) = (path.canonicalize(), root.canonicalize()) else { return Ok(()) };
    if real.starts_with(&real_root) {
        return Ok(());
    }
    Err(PackageError::Escapes { path: path.to_owned(), package: root.to_owned() })
}

impl FileWeights {
    pub(super) fn new(place: ModelPlace) -> FileWeights {
        FileWeights { place, files: Mutex::default(), small: Mutex::default(), bytes_read: AtomicU64::new(0) }
    }

    /// How many bytes of weight data were read so far, records not counted.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    fn open(&self, name: &Arc<str>) -> Result<Arc<File>, String> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(name) {
            return Ok(file.clone());
        }
        let path = self.place.resolve(name).map_err(|e| e.to_string())?;
        let file = open_file(&path).map_err(|e| format!("cannot open {}: {e}", path.display()))?;
        let mut header = [0; 8];
        read_at(&file, &mut header, 0).map_err(|e| format!("cannot read the header of {}: {e}", path.display()))?;
        match u32_at(&header, 4) {
            2 => {}
            version => return Err(format!("{} is of storage version {version}, not 2", path.display())),
        }
        Ok(files.entry(name.clone()).or_insert(Arc::new(file)).clone())
    }

    fn read_blob(&self, blob: &BlobRef, ty: &TensorType) -> Result<Vec<u8>, String> {
        let need = ty.byte_len().ok_or_else(|| format!("{ty} has no fixed size in bytes"))?;
        self.read_bytes(blob, ty, 0..need)
    }

    fn read_bytes(&self, blob: &BlobRef, ty: &TensorType, part: Range<u64>) -> Result<Vec<u8>, String> {
        let need = ty.byte_len().ok_or_else(|| format!("{ty} has no fixed size in bytes"))?;
        if part.start > part.end || part.end > need {
            return Err(format!("there are only {need} bytes"));
        }
        let file = self.open(&blob.file)?;
        let len = file.metadata().map_err(|e| e.to_string())?.len();
        let mut bytes = [0; ALIGNMENT];
        if blob.offset.checked_add(ALIGNMENT as u64).is_none_or(|end| end > len) {
            return Err(format!("the record runs past the end of the file ({len} bytes)"));
        }
        read_at(&file, &mut bytes, blob.offset).map_err(|e| e.to_string())?;
        let record = Record::parse(&bytes, ty)?;
        if record.size != need {
            return Err(format!("the record holds {} bytes, {ty} needs {need}", record.size));
        }
        if record.offset.checked_add(need).is_none_or(|end| end > len) {
            return Err(format!("its data runs past the end of the file ({len} bytes)"));
        }
        let size = part.end - part.start;
        let mut data = vec![0; usize::try_from(size).map_err(|_| "it is larger than memory".to_string())?];
        read_at(&file, &mut data, record.offset + part.start).map_err(|e| e.to_string())?;
        self.bytes_read.fetch_add(size, Ordering::Relaxed);
        Ok(data)
    }
}

impl Weights for FileWeights {
    fn read(&self, blob: &BlobRef, ty: &TensorType) -> Result<Vec<u8>, LiteralError> {
        let failed = |reason| LiteralError::Weight { blob: blob.clone(), reason };
        if !ty.dtype.is_int() || ty.byte_len().is_none_or(|n| n > MAX_KEPT) {
            return self.read_blob(blob, ty).map_err(failed);
        }
        let mut small = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (blob.clone(), ty.clone());
        if let Some(data) = small.get(&key) {
            return Ok(data.clone());
        }
        let data = self.read_blob(blob, ty).map_err(failed)?;
        small.insert(key, data.clone());
        Ok(data)
    }

    fn read_part(&self, blob: &BlobRef, ty: &TensorType, part: Range<u64>) -> Result<Vec<u8>, LiteralError> {
        self.read_bytes(blob, ty, part).map_err(|reason| LiteralError::Weight { blob: blob.clone(), reason })
    }
}

/// The part of a blob's record that readers need.
struct Record {
    size: u64,
    offset: u64,
}

impl Record {
    fn parse(bytes: &[u8; ALIGNMENT], ty: &TensorType) -> Result<Record, String> {
        if u32_at(bytes, 0) != SENTINEL {
            return Err("there is no blob record at this offset".into());
        }
        let number = u32_at(bytes, 4);
        let found = BLOB_TYPES.iter().find(|(n, _)| *n == number).map(|(_, d)| *d);
        if found != Some(ty.dtype) {
            let found = found.map_or_else(|| format!("unknown type {number}"), |d| d.to_string());
            return Err(format!("the record holds {found}, the program says {}", ty.dtype));
        }
        let record = Record { size: u64_at(bytes, 8), offset: u64_at(bytes, 16) };
        let padding = u64_at(bytes, 24);
        if padding_bits(ty).is_some_and(|want| want != padding) {
            return Err(format!("the record has {padding} padding bits, which does not fit {ty}"));
        }
        Ok(record)
    }
}

/// Unused bits in the last byte; `None` for types of whole bytes, whose record may hold anything there.
fn padding_bits(ty: &TensorType) -> Option<u64> {
    let bits = u64::from(ty.dtype.bits()?);
    if bits >= 8 {
        return None;
    }
    let used = ty.volume()?.checked_mul(bits)? % 8;
    Some((8 - used) % 8)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}

/// A weight file in the making.
#[derive(Debug, Default)]
pub(super) struct BlobWriter {
    bytes: Vec<u8>,
    count: u32,
    /// Offsets of records by a hash of their content.
    written: HashMap<u64, Vec<u64>>,
}

impl BlobWriter {
    /// Whether a tensor of this type belongs in a weight file: what coremltools would put there at this
    /// `specificationVersion`.
    pub(super) fn takes(ty: &TensorType, specification_version: i32) -> bool {
        use DType::*;
        let wide = matches!(ty.dtype, I16 | U16 | I32 | U32);
        let kept_inline = matches!(ty.dtype, Bool | String | F64 | I64 | U64) || (wide && specification_version < 9);
        !kept_inline && ty.volume().is_some_and(|n| n >= 10)
    }

    /// Appends a blob, or finds the one that is there with the same content; returns the offset of its record.
    pub(super) fn append(&mut self, ty: &TensorType, data: &[u8]) -> Option<u64> {
        let number = BLOB_TYPES.iter().find(|(_, d)| *d == ty.dtype)?.0;
        let mut hasher = DefaultHasher::new();
        data.hash(&mut hasher);
        let hash = hasher.finish();
        let same = self.written.get(&hash).into_iter().flatten().find(|&&at| self.holds(at, number, data));
        if let Some(&offset) = same {
            return Some(offset);
        }
        self.bytes.resize(self.bytes.len().max(ALIGNMENT).next_multiple_of(ALIGNMENT), 0);
        let offset = self.bytes.len() as u64;
        self.bytes.extend(SENTINEL.to_le_bytes());
        self.bytes.extend(number.to_le_bytes());
        for word in [data.len() as u64, offset + ALIGNMENT as u64, padding_bits(ty).unwrap_or(0), 0, 0, 0, 0] {
            self.bytes.extend(word.to_le_bytes());
        }
        self.bytes.extend_from_slice(data);
        self.count += 1;
        self.written.entry(hash).or_default().push(offset);
        Some(offset)
    }

    fn holds(&self, record: u64, number: u32, data: &[u8]) -> bool {
        let at = record as usize;
        let start = at + ALIGNMENT;
        u32_at(&self.bytes, at + 4) == number
            && u64_at(&self.bytes, at + 8) == data.len() as u64
            && self.bytes.get(start..start + data.len()) == Some(data)
    }

    /// The file; `None` when it would hold no blob.
    pub(super) fn finish(mut self) -> Option<Vec<u8>> {
        if self.count == 0 {
            return None;
        }
        self.bytes[..4].copy_from_slice(&self.count.to_le_bytes());
        self.bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
        Some(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(bytes: &[u8]) -> (tempfile::TempDir, FileWeights) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("weights")).unwrap();
        std::fs::write(dir.path().join("weights/weight.bin"), bytes).unwrap();
        let root = dir.path().to_owned();
        let place = ModelPlace { model_dir: root.clone(), root, follow_symlinks: false };
        (dir, FileWeights::new(place))
    }

    fn read(w: &FileWeights, dtype: DType, count: u64, offset: u64) -> Result<Vec<u8>, String> {
        let blob = BlobRef { file: "@model_path/weights/weight.bin".into(), offset };
        w.read_blob(&blob, &TensorType::fixed(dtype, &[count]))
    }

    /// The layout and the numbers are those of a file that coremltools' writer made.
    #[test]
    fn writes_what_coremltools_writes() {
        let mut writer = BlobWriter::default();
        let fp16 = TensorType::fixed(DType::F16, &[3]);
        assert_eq!(writer.append(&fp16, &[0, 0x3c, 0, 0xc0, 0, 0x38]), Some(64));
        let fp32 = [0u8; 68];
        assert_eq!(writer.append(&TensorType::fixed(DType::F32, &[17]), &fp32), Some(0xc0));
        assert_eq!(writer.append(&TensorType::fixed(DType::U6, &[5]), &[0x81, 0xf0, 0x87, 5]), Some(0x180));
        assert_eq!(writer.append(&fp16, &[0, 0x3c, 0, 0xc0, 0, 0x38]), Some(64), "one record for equal content");
        let file = writer.finish().unwrap();
        assert_eq!(file[..8], [3, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(
            file[64..88],
            [0xef, 0xbe, 0xad, 0xde, 1, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(file[0xc0..0xcc], [0xef, 0xbe, 0xad, 0xde, 2, 0, 0, 0, 0x44, 0, 0, 0]);
        assert_eq!(file[0x198], 2, "padding bits of five 6-bit elements");
        let (_dir, w) = weights(&file);
        assert_eq!(read(&w, DType::F16, 3, 64).unwrap(), [0, 0x3c, 0, 0xc0, 0, 0x38]);
        assert_eq!(read(&w, DType::U6, 5, 0x180).unwrap(), [0x81, 0xf0, 0x87, 5]);
        assert_eq!(w.bytes_read(), 10);
    }

    #[test]
    fn damaged_records_are_errors() {
        let mut writer = BlobWriter::default();
        writer.append(&TensorType::fixed(DType::U4, &[3]), &[0xf1, 7]);
        let good = writer.finish().unwrap();
        let check = |edit: &dyn Fn(&mut Vec<u8>), dtype, count, offset| {
            let mut bytes = good.clone();
            edit(&mut bytes);
            let (_dir, w) = weights(&bytes);
            read(&w, dtype, count, offset).unwrap_err()
        };
        let keep = &|_: &mut Vec<u8>| {};
        assert_eq!(check(keep, DType::U4, 3, 128), "the record runs past the end of the file (130 bytes)");
        assert_eq!(check(keep, DType::U4, 3, u64::MAX), "the record runs past the end of the file (130 bytes)");
        assert_eq!(check(keep, DType::U4, 3, 0), "there is no blob record at this offset");
        assert_eq!(check(keep, DType::I4, 3, 64), "the record holds uint4, the program says int4");
        assert_eq!(check(keep, DType::U4, 5, 64), "the record holds 2 bytes, tensor<uint4, [5]> needs 3");
        assert_eq!(
            check(&|b| b[64 + 24] = 8, DType::U4, 3, 64),
            "the record has 8 padding bits, which does not fit tensor<uint4, [3]>"
        );
        assert_eq!(
            check(&|b| b[64 + 16] = 129, DType::U4, 3, 64),
            "its data runs past the end of the file (130 bytes)"
        );
        assert_eq!(
            check(&|b| b[68] = 99, DType::U4, 3, 64),
            "the record holds unknown type 99, the program says uint4"
        );
        assert!(check(&|b| b[4] = 1, DType::U4, 3, 64).ends_with("weight.bin is of storage version 1, not 2"));
        assert!(check(&|b| b.truncate(3), DType::U4, 3, 64).contains("cannot read the header"));
    }

    #[test]
    fn huge_shapes_are_errors() {
        let (_dir, w) = weights(&[0, 0, 0, 0, 2, 0, 0, 0]);
        assert!(read(&w, DType::F32, u64::MAX, 64).unwrap_err().contains("has no fixed size"));
        assert!(read(&w, DType::F32, 1 << 60, 64).is_err());
    }

    #[test]
    fn paths_stay_below_the_model() {
        for (file, ok) in [
            ("@model_path/weights/weight.bin", true),
            ("weights/0-weight.bin", true),
            ("@model_path/../weight.bin", false),
            ("@model_path//etc/passwd", false),
            ("/etc/passwd", false),
            ("", false),
        ] {
            assert_eq!(relative_path(file).is_some(), ok, "{file}");
        }
    }
}
