//! The rules that every kind shares: which parameters are bound, how often, by constants or not, with which types.

use crate::ir::{DType, Operand, ValueType};
use crate::opset::signature::{Accepts, Default, ParamDef};

use super::{Context, Problem, Stop};

/// Checks the bound parameters of an op against its definition.
pub(super) fn params(c: &Context<'_>) -> Result<(), Stop> {
    let data = c.f.op(c.op);
    let attributes = data.attributes().map(|(n, _)| n).filter(|n| **n != "name");
    if let Some(unknown) = data.params().map(|(n, _)| n).chain(attributes).find(|n| c.version.param(n).is_none()) {
        return Err(Problem::UnknownParam(unknown.clone()).into());
    }
    let mut groups: Vec<(&ParamDef, DType)> = Vec::new();
    for def in c.version.params() {
        let types = c.types(def.name());
        bindings(c, def, types.len())?;
        if let ([ty], Accepts::Tensor(allowed)) = (&types[..], def.accepts()) {
            let Some(dtype) = element(ty) else { continue };
            if !allowed.contains(&dtype) {
                let allowed = allowed.iter().map(|d| d.name()).collect::<Vec<_>>().join(", ");
                return Err(Problem::DType { param: def.name(), dtype, allowed }.into());
            }
            group(&mut groups, def, dtype)?;
        }
    }
    Ok(())
}

fn bindings(c: &Context<'_>, def: &ParamDef, count: usize) -> Result<(), Stop> {
    let param = def.name();
    if count == 0 {
        return match def.default() {
            None => Err(Problem::MissingParam(param).into()),
            Some(_) => Ok(()),
        };
    }
    if count > 1 && *def.accepts() != Accepts::Tuple {
        return Err(Problem::Bindings { param, count }.into());
    }
    let constant = |o: &Operand| c.f.operand_literal(o).is_some() || o.as_value().is_some_and(|v| is_constexpr(c, v));
    if def.is_constant() && !c.f.op(c.op).param(param).iter().all(constant) {
        return Err(Problem::NotConstant(param).into());
    }
    Ok(())
}

fn is_constexpr(c: &Context<'_>, v: crate::ir::ValueId) -> bool {
    c.f.producer(v).is_some_and(|op| c.f.op(op).kind().starts_with("constexpr_"))
}

fn element(ty: &ValueType) -> Option<DType> {
    match ty {
        ValueType::Tensor(t) => Some(t.dtype),
        ValueType::Unranked(d) => Some(*d),
        _ => None,
    }
}

/// Files converted with fp32 constants from fp16 graphs hold fp32 defaults in fp16 groups; a default that is a number
/// is therefore not held against its group.
fn group<'d>(groups: &mut Vec<(&'d ParamDef, DType)>, def: &'d ParamDef, dtype: DType) -> Result<(), Stop> {
    if def.group().is_none() || (def.is_constant() && matches!(def.default(), Some(Default::Float(_)))) {
        return Ok(());
    }
    match groups.iter().find(|(other, _)| other.group() == def.group()) {
        Some((_, d)) if *d == dtype => {}
        Some((other, d)) => {
            return Err(Problem::Group { param: def.name(), dtype, other: other.name(), other_dtype: *d }.into());
        }
        None => groups.push((def, dtype)),
    }
    Ok(())
}
